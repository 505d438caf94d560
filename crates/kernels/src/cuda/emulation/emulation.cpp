// Runs an exported kernel, one block after the other; see emulation.h.
#include "emulation.h"

asm(R"(
.text
.globl trainer_emulation_switch
.type trainer_emulation_switch, @function
trainer_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size trainer_emulation_switch, . - trainer_emulation_switch
)");

namespace emulation {

static constexpr size_t STACK = 256 << 10;

static thread_local std::string error; // of the last launch of this thread
static bool in_fiber, failed;

struct Failure {};

void fail(const char *what) {
  error = std::string("kernel `") + kernel_name + "`, block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(current) + ": " + what;
  std::fprintf(stderr, "emulation: %s\n", error.c_str());
  failed = true;
  if (!in_fiber) throw Failure();
  yield(); // to run_warp, which ends the launch
  std::abort();
}

struct Call {
  Entry entry;
  void **arguments;
};

static void fiber_main() {
  Call *call = static_cast<Call *>(body_data);
  call->entry.run(call->entry.function, call->arguments);
  Fiber &fiber = fibers[current];
  if (!fiber.open.empty() || !fiber.groups.empty()) fail("ends before it has waited for its copies");
  fiber.finished = true;
  alive--;
  if (alive > 0 && at_barrier == alive) release_barrier();
  yield();
  std::abort(); // a finished fiber never resumes
}

static void prepare(Fiber &fiber) {
  if (fiber.stack.empty()) fiber.stack.resize(STACK);
  uintptr_t top = reinterpret_cast<uintptr_t>(fiber.stack.data() + STACK) & ~uintptr_t(63);
  void **frame = reinterpret_cast<void **>(top - 64);
  for (int i = 0; i < 6; i++) frame[i] = nullptr; // registers
  frame[6] = reinterpret_cast<void *>(fiber_main);
  fiber.stack_pointer = frame;
  fiber.groups.clear();
  fiber.open.clear();
  fiber.operations = 0;
  fiber.finished = false;
}

static void mix(std::vector<unsigned> &items) {
  for (size_t i = items.size() - 1; i > 0; i--) std::swap(items[i], items[next_random() % (i + 1)]);
}

// Runs every lane of a warp to its next wait. Returns false if no lane made progress.
static bool run_warp(unsigned warp, const std::vector<unsigned> &lanes) {
  auto progress = [warp] { // counts arrivals and finished fibers
    long sum = named_arrivals + block_arrivals - alive;
    for (unsigned lane = 0; lane < 32; lane++) sum += fibers[32 * warp + lane].operations;
    return sum;
  };
  long before = progress();
  for (unsigned lane : lanes) {
    unsigned index = 32 * warp + lane;
    if (fibers[index].finished) continue;
    current = int(index);
    threadIdx = {index, 0, 0};
    in_fiber = true;
    trainer_emulation_switch(&scheduler_pointer, fibers[index].stack_pointer);
    in_fiber = false;
    if (failed) throw Failure();
  }
  return progress() != before;
}

// Checks that no thread has written beyond the shared memory of the launch: all bytes are still 0xFF.
static void check_shared(size_t bytes) {
  const unsigned char *rest = shared_memory + bytes;
  size_t count = SHARED - bytes;
  if (count > 0 && (rest[0] != 0xFF || std::memcmp(rest, rest + 1, count - 1) != 0)) fail("writes beyond the shared memory of its launch");
}

static void run_block(unsigned threads, unsigned shared_bytes) {
  std::memset(shared_memory, 0xFF, SHARED);
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp());
  for (Fiber &fiber : fibers) prepare(fiber);
  alive = int(threads);
  at_barrier = 0;
  barrier_generation = 0;
  for (Barrier &barrier : named_barriers) barrier = Barrier();
  std::vector<unsigned> lanes(32), order(threads / 32);
  for (unsigned i = 0; i < 32; i++) lanes[i] = i;
  for (unsigned i = 0; i < order.size(); i++) order[i] = i;
  mix(lanes);
  for (unsigned idle_sweeps = 0; alive > 0;) {
    mix(order);
    bool moved = false;
    for (unsigned warp : order)
      while (run_warp(warp, lanes)) moved = true; // as far as possible, to expose missing barriers
    idle_sweeps = moved ? 0 : idle_sweeps + 1;
    if (idle_sweeps > 2) fail("deadlock: not all threads reach a barrier or a warp operation");
  }
  check_shared(shared_bytes);
}

} // namespace emulation

// The error of the last launch of this thread that failed.
extern "C" const char *trainer_emulation_error() { return emulation::error.c_str(); }

// Runs kernel `name` on a grid of blocks of `threads`. Returns 0; 1 if there is no such kernel; 2 if it
// fails, with a message in trainer_emulation_error.
extern "C" int trainer_emulation_launch(const char *name, const unsigned *grid, unsigned threads, unsigned shared_bytes, void **arguments) try {
  using namespace emulation;
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  auto found = entries().find(name);
  if (found == entries().end()) return 1;
  static std::vector<unsigned char> storage(SHARED + 128);
  shared_memory = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(storage.data()) + 127) & ~uintptr_t(127));
  kernel_name = found->first.c_str();
  current = 0;
  failed = in_fiber = false;
  if (shared_bytes > SHARED) fail("requests more shared memory than a block can have");
  if (threads == 0 || threads > 1024 || threads % 32) fail("a block must have whole warps and at most 1024 threads");
  Call call{found->second, arguments};
  body_data = &call;
  blockDim = {threads, 1, 1};
  gridDim = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block(threads, shared_bytes);
      }
  return 0;
} catch (const emulation::Failure &) {
  return 2;
}
