"""The commands of ``diloco``, one module each."""
