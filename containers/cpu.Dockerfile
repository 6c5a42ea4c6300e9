# The CPU demo: a real `vllm serve` of the tiny models of this repository. In the repository's root:
#
#     docker build -f containers/cpu.Dockerfile -t vllm-dllm-cpu .
#
# BASE may be another image with Python 3.11 and its `venv` module.
ARG BASE=python:3.11.15-slim-bookworm

FROM ${BASE} AS build
# Where torch's CPU build comes from; PyPI's own needs gigabytes of CUDA libraries.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/vllm-dllm/bin:$PATH
# torch in a layer of its own, which a change of this package does not touch.
RUN python3 -m venv /opt/vllm-dllm && pip install torch==2.13.0
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY packages/canvas-grammar packages/canvas-grammar
COPY packaging/vllm-cpu-metadata packaging/vllm-cpu-metadata
COPY packages/vllm-cpu-v2 packages/vllm-cpu-v2
COPY examples/tiny/checkpoints examples/tiny/checkpoints
COPY vllm_dllm vllm_dllm
RUN pip wheel --no-deps --wheel-dir /wheels \
      ./packaging/vllm-cpu-metadata ./packages/vllm-cpu-v2 ./packages/canvas-grammar . \
    && pip install torch==2.13.0 /wheels/*.whl
RUN ln -s "$(python -c 'import vllm_dllm.selftest as room; print(room.__path__[0])')/checkpoints" \
    /opt/vllm-dllm/models

FROM ${BASE}
LABEL org.opencontainers.image.title="vllm-dllm (CPU demo)" \
      org.opencontainers.image.description="vLLM's CPU build with vllm-dllm, serving a tiny diffusion language model" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM's CPU operators are linked to libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 dllm
COPY --from=build /opt/vllm-dllm /opt/vllm-dllm
# One thread is the fastest for models this small, and binding it to a core needs a privilege that
# containers do not have.
ENV PATH=/opt/vllm-dllm/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
USER 1000
WORKDIR /home/dllm
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
# There is no C++ compiler in this image, so it needs --enforce-eager.
CMD ["/opt/vllm-dllm/models/tiny-llada2", "--served-model-name", "tiny-llada2", "--enforce-eager", \
     "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M"]
