# Images of Decoupled DiLoCo: --target synchronizer, learner (trainer, evaluator, the `diloco` command)
# or link (tc, for compose/chaos.yaml). docs/deploy-compose.md says how they are used.
#
#   TORCH_INDEX   package index of torch's build; the CPU one by default, another one for CUDA:
#                 docker build --target learner --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
#   BASE          a Debian with Python 3.11 or later, by tag or digest
#   VERSION, REVISION   for the labels
#
# A torch wheel in wheels/ is taken instead of the index's; it enters no layer.
ARG BASE=python:3.11-slim-bookworm

# Everything pinned that the project needs, and nothing of the project: this layer changes with the lock.
FROM ${BASE} AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml requirements.lock ./
COPY scripts/image_requirements.py scripts/
# Compiled here: on a read-only root every start would compile torch anew. What of torch is for building
# against it, or for its own tests, stays out.
RUN --mount=type=bind,source=wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    set -eu; \
    python -m venv --without-pip /opt/diloco; \
    python scripts/image_requirements.py fast tokenizers > requirements.txt; \
    index="--extra-index-url ${TORCH_INDEX}"; \
    if ls /wheels/torch-*.whl >/dev/null 2>&1; then index=""; fi; \
    pip --python /opt/diloco/bin/python install --quiet --constraint requirements.lock \
        --requirement requirements.txt --find-links /wheels ${index}; \
    torch=$(/opt/diloco/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch; \
    rm -rf "${torch}/include" "${torch}/share" "${torch}/test"; \
    find "${torch}/bin" -mindepth 1 ! -name torch_shm_manager -delete

FROM ${BASE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --quiet --constraint requirements.lock setuptools
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY synchronizer_server synchronizer_server
COPY learner_client learner_client
COPY diloco_fleet diloco_fleet
RUN pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${BASE} AS runtime
# Numeric, so that orchestrators can verify that it is not root. The folders are mount points: a new
# volume takes their owner.
RUN groupadd --gid 10001 diloco \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin diloco \
 && install --directory --owner 10001 --group 10001 --mode 0750 /var/lib/diloco \
        /var/lib/diloco/run /var/lib/diloco/store /var/lib/diloco/key /var/lib/diloco/self
COPY --from=dependencies /opt/diloco /opt/diloco
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/diloco/bin/python install --quiet --no-deps --no-index --no-cache-dir /dist/*.whl
ENV PATH=/opt/diloco/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Decoupled DiLoCo" \
      org.opencontainers.image.description="Pre-training that never stops" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /var/lib/diloco
USER 10001:10001
STOPSIGNAL SIGTERM

# For slow links alone: it runs as root with NET_ADMIN, and nothing else, in another container's network.
FROM ${BASE} AS link
RUN apt-get update \
 && apt-get install --yes --no-install-recommends iproute2 \
 && rm -rf /var/lib/apt/lists/*

FROM runtime AS synchronizer
LABEL org.opencontainers.image.title="Decoupled DiLoCo synchronizer"
EXPOSE 50051 8080
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["diloco-health", "serving", "127.0.0.1:50051"]
ENTRYPOINT ["diloco-synchronizer"]
CMD ["serve", "--store", "/var/lib/diloco/store"]

FROM runtime AS learner
LABEL org.opencontainers.image.title="Decoupled DiLoCo learner"
EXPOSE 8080
HEALTHCHECK --interval=20s --timeout=10s --start-period=120s --retries=3 \
    CMD ["diloco-health", "writing", "/var/lib/diloco/run", \
         "--name-file", "/var/lib/diloco/self/learner-id", "--max-age", "60"]
ENTRYPOINT ["diloco-learner"]
CMD ["train", "--run-dir", "/var/lib/diloco/run", \
     "--learner-id-file", "/var/lib/diloco/self/learner-id"]
