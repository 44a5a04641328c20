# Inference with vLLM, on its makers' image.
# docker build -f vllm.Dockerfile -t registry.example.org/hpcml/vllm:0.30.0-1 .
FROM docker.io/vllm/vllm-openai:v0.30.0

LABEL hpcml.image=vllm-0.30.0-1
# A base without a locale makes Python print ASCII only.
ENV LC_ALL=C.UTF-8
# The base's own builds of torch and the like stay: they are made for each other and for its CUDA.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT= \
    && { python3 -m pip list --format=freeze | grep -E '^(torch|triton|nvidia-[a-z0-9-]+|numpy|vllm|sglang)==' \
         > /tmp/installed.txt || true; } \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt \
        pyarrow==26.0.1 jinja2==3.1.6 \
    && rm /tmp/installed.txt
# The base starts a server; hpcml starts its worker.
ENTRYPOINT []
CMD ["python3"]
