# The binary with CUDA, for nodes with NVIDIA GPUs:
#
#   docker build -t trainer .
#   docker run --gpus all --ipc=host -v "$PWD:/work" trainer sft --config config.yaml
#
# The node needs a driver of version 580 or later and the NVIDIA container toolkit. The container has
# the CUDA libraries, and NCCL for several GPUs (docs/cuda.md, docs/distributed.md).

FROM nvidia/cuda:13.0.1-devel-ubuntu22.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV CARGO_HOME=/opt/cargo RUSTUP_HOME=/opt/rustup CARGO_INCREMENTAL=0
ENV PATH=/opt/cargo/bin:$PATH
RUN curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs \
    | sh -s -- -y --profile minimal --default-toolchain 1.95.0
# Compute capability 8.0 is the oldest supported one; newer GPUs run the same code.
ARG CUDA_COMPUTE_CAP=80
ENV CUDA_COMPUTE_CAP=$CUDA_COMPUTE_CAP CUDA_HOME=/usr/local/cuda
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin trainer --features cuda && strip target/release/trainer

# `runtime` has cuBLAS, cuRAND and NVRTC, and NCCL. The binary starts only where the driver is: the
# container toolkit adds libcuda.so.1 to containers, not to builds.
FROM nvidia/cuda:13.0.1-runtime-ubuntu22.04
COPY --from=build /src/target/release/trainer /usr/local/bin/trainer
# Messages of the program name files of these folders.
COPY docs /usr/local/share/doc/trainer/docs
WORKDIR /work
ENTRYPOINT ["trainer"]
