# lean-finetune with the tested versions. docs/installation.md says how to run it with GPUs, your files and your user id.
#   docker build -t lean-finetune .
FROM python:3.12-slim

# pip reads it. By default PyTorch comes with CUDA; for CPUs: https://download.pytorch.org/whl/cpu
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRAS=tensorboard

# DVC's experiments are git commits.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends git && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY cuda_memory cuda_memory
COPY lean_finetune lean_finetune
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

# Any user id may run it (docker run --user): home and the hub's cache take files of each.
RUN useradd --create-home --uid 1000 trainer && \
    mkdir /project /cache && \
    chown trainer /project && \
    chmod 0777 /home/trainer /cache
ENV HOME=/home/trainer USER=trainer HF_HOME=/cache NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER trainer
WORKDIR /project
VOLUME ["/cache"]
CMD ["lean-finetune", "--help"]
