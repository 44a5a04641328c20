# Training with the engine megatron, on NVIDIA's PyTorch with Transformer Engine.
# docker build -f megatron.Dockerfile -t registry.example.org/hpcml/megatron:0.16.1-1 .
FROM nvcr.io/nvidia/pytorch:25.12-py3

LABEL hpcml.image=megatron-0.16.1-1
# A base without a locale makes Python print ASCII only.
ENV LC_ALL=C.UTF-8
# The base's own builds of torch and the like stay: they are made for each other and for its CUDA.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT= \
    && { python3 -m pip list --format=freeze | grep -E '^(torch|triton|nvidia-[a-z0-9-]+|numpy|vllm|sglang)==' \
         > /tmp/installed.txt || true; } \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt \
        transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 megatron-core==0.16.1 \
        psutil==7.2.2 pyarrow==26.0.1 jinja2==3.1.6 \
    && rm /tmp/installed.txt
CMD ["python3"]
