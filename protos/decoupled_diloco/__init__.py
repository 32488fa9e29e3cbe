"""What synchronizer and learners share: protos, layouts, codecs, settings, reasons."""
