# The binary with CUDA, for nodes with NVIDIA GPUs:
#
#   docker build -t trainer .
#   docker run --gpus all --ipc=host -v "$PWD:/work" trainer sft --config config.yaml
#
# The node needs a driver of version 580 or later and the NVIDIA container toolkit. The container has
# the CUDA libraries, and NCCL for several GPUs (docs/cuda.md, docs/distributed.md).
#
# The same for CPUs:
#
#   docker build -t trainer --build-arg FEATURES= \
#     --build-arg BUILD_IMAGE=debian:12 --build-arg RUNTIME_IMAGE=debian:12-slim .

ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu22.04
# `runtime` has cuBLAS, cuRAND and NVRTC, and NCCL. Its glibc must not be older than that of BUILD_IMAGE.
ARG RUNTIME_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu22.04

FROM ${BUILD_IMAGE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV CARGO_HOME=/opt/cargo RUSTUP_HOME=/opt/rustup CARGO_INCREMENTAL=0
ENV PATH=/opt/cargo/bin:$PATH
RUN curl --proto '=https' --tlsv1.2 -sSf -o /tmp/rustup.sh https://sh.rustup.rs \
    && sh /tmp/rustup.sh -y --profile minimal --default-toolchain 1.95.0
ARG FEATURES=cuda
# Compute capability 8.0 is the oldest supported one; newer GPUs run the same code.
ARG CUDA_COMPUTE_CAP=80
ENV CUDA_COMPUTE_CAP=$CUDA_COMPUTE_CAP CUDA_HOME=/usr/local/cuda
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin trainer --features "$FEATURES" && strip target/release/trainer

# The binary with CUDA starts only where the driver is: the container toolkit adds libcuda.so.1 to
# containers, not to builds.
FROM ${RUNTIME_IMAGE}
COPY --from=build /src/target/release/trainer /usr/local/bin/trainer
# Messages of the program name files of these folders.
COPY README.md LICENSE /usr/local/share/doc/trainer/
COPY docs /usr/local/share/doc/trainer/docs
COPY scripts/trackers/read_*.py /usr/local/share/doc/trainer/scripts/trackers/
COPY configs /usr/local/share/doc/trainer/configs
WORKDIR /work
ENTRYPOINT ["trainer"]
