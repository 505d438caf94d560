# The binary with CUDA, for nodes with NVIDIA GPUs:
#
#   docker build -t trainer .
#   docker run --gpus all --ipc=host -v "$PWD:/work" trainer sft --config config.yaml
#
# The node needs a driver of version 580 or later and the NVIDIA container toolkit. The container has
# the CUDA libraries, and NCCL for several GPUs (docs/cuda.md, docs/distributed.md).

FROM nvidia/cuda:13.0.1-devel-ubuntu22.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs \
    | sh -s -- -y --profile minimal --default-toolchain 1.95.0
ENV PATH=/root/.cargo/bin:$PATH CARGO_INCREMENTAL=0
# Compute capability 8.0 is the oldest supported one; newer GPUs run the same code.
ARG CUDA_COMPUTE_CAP=80
ENV CUDA_COMPUTE_CAP=$CUDA_COMPUTE_CAP CUDA_HOME=/usr/local/cuda
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin trainer --features cuda && strip target/release/trainer

# `runtime` has cuBLAS, cuRAND and NVRTC, and NCCL.
FROM nvidia/cuda:13.0.1-runtime-ubuntu22.04
COPY --from=build /src/target/release/trainer /usr/local/bin/trainer
RUN trainer completions bash > /etc/bash_completion.d/trainer || true
WORKDIR /work
ENTRYPOINT ["trainer"]
