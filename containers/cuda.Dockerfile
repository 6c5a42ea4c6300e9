# vLLM's own image with this package. In the repository's root:
#
#     docker build -f containers/cuda.Dockerfile -t vllm-dllm-cuda .
#
# BASE is the image of the vLLM release that is tested.
ARG BASE=vllm/vllm-openai:v0.32.0

FROM python:3.11.15-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY packages/canvas-grammar packages/canvas-grammar
COPY examples/tiny/checkpoints examples/tiny/checkpoints
COPY vllm_dllm vllm_dllm
RUN pip wheel --no-deps --wheel-dir /wheels ./packages/canvas-grammar .

FROM ${BASE}
LABEL org.opencontainers.image.title="vllm-dllm (CUDA)" \
      org.opencontainers.image.description="vLLM's image with vllm-dllm, which serves block-diffusion language models" \
      org.opencontainers.image.licenses="Apache-2.0"
# All that the image has is held at its version, vLLM and torch above all: what would replace a
# package fails here. vLLM's entrypoint, `vllm serve`, stays.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    uv pip list --system --format freeze >/tmp/held.txt \
    && uv pip install --system --no-cache --constraint /tmp/held.txt /wheels/*.whl \
    && rm /tmp/held.txt
# vLLM's image has this user, `vllm`, for those who do not want root. It makes the folders, so that
# named volumes mounted there can be written.
USER 2000
WORKDIR /home/vllm
RUN mkdir -p .cache/huggingface .cache/vllm
EXPOSE 8000
# Weights of many gigabytes are downloaded and loaded before the server answers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
