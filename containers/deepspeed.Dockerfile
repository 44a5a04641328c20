# Training with the engine deepspeed, on PyTorch of AWS's Deep Learning Containers.
# docker build -f deepspeed.Dockerfile -t registry.example.org/hpcml/deepspeed:0.19.8-1 .
FROM public.ecr.aws/deep-learning-containers/pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2-v1.11

LABEL hpcml.image=deepspeed-0.19.8-1
# A base without a locale makes Python print ASCII only.
ENV LC_ALL=C.UTF-8
# The base's own builds of torch and the like stay: they are made for each other and for its CUDA.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT= \
    && { python3 -m pip list --format=freeze | grep -E '^(torch|triton|nvidia-[a-z0-9-]+|numpy|vllm|sglang)==' \
         > /tmp/installed.txt || true; } \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt \
        transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 pyarrow==26.0.1 jinja2==3.1.6 \
    && DS_BUILD_OPS=0 python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt \
        --no-build-isolation ninja deepspeed==0.19.8 \
    && rm /tmp/installed.txt
CMD ["python3"]
