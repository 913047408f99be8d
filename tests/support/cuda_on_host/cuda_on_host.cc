#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "ptx_on_host.h"

dim3 gridDim;
dim3 blockIdx;
dim3 blockDim;
dim3 threadIdx;

// Leaves the running fiber and goes on with another one. A fiber that does not
// run is its stack pointer, which points to the six registers that a function
// must keep, and the address where the fiber goes on. swapcontext() would make
// two system calls for each switch, which took four fifths of the tests' time.
extern "C" void WeftSwitchFiber(uint64_t** from, uint64_t* to);
asm(R"(
.text
.type WeftSwitchFiber, @function
WeftSwitchFiber:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size WeftSwitchFiber, . - WeftSwitchFiber
)");

namespace weft::testing::cuda_on_host {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackWords = (32 << 10) / sizeof(uint64_t);
// The dynamic shared memory of a kernel whose limit was not raised.
constexpr int kDefaultSharedBytes = 48 << 10;

enum class Waits { kNot, kForWarp, kForBlock, kDone };

struct Copy {
  const void* from = nullptr;
  size_t num_bytes = 0;
  char* to = nullptr;
  size_t to_bytes = 0;
};
using CopyGroup = std::vector<Copy>;

struct Fiber {
  uint64_t* stack_pointer = nullptr;
  std::unique_ptr<uint64_t[]> stack;
  Waits waits = Waits::kNot;
  bool has_waited_for_grids = false;
  unsigned num_exchanges = 0;
  std::deque<CopyGroup> ended_copies;
  CopyGroup copies;
};

// The fibers of the running block. The next block reuses them.
struct Block {
  std::vector<Fiber> fibers;
  uint64_t* scheduler = nullptr;
  unsigned running = 0;
  const std::function<void()>* thread = nullptr;
  // Each launch allocates exactly as many bytes as it asks for, so that a
  // sanitizer sees accesses beyond them.
  std::unique_ptr<char[]> dynamic_shared;
  alignas(16) char slots[2][kMaxThreads * kSlotBytes];
};
Block block;

struct QueuedCopy {
  const void* from = nullptr;
  size_t num_bytes = 0;
  void* to = nullptr;
};
std::vector<QueuedCopy> queued_copies;

// The raised limits of dynamic shared memory.
std::unordered_map<const void*, int> raised_shared_bytes;

// Returns the bound of the kernel's __launch_bounds__, or kMaxThreads.
unsigned MaxThreadsOf(const void* kernel) {
  constexpr unsigned char kNop = 0x90;
  constexpr unsigned char kEndbr64[] = {0xF3, 0x0F, 0x1E, 0xFA};
  const auto* code = static_cast<const unsigned char*>(kernel);
  if (std::memcmp(code, kEndbr64, sizeof(kEndbr64)) == 0) {
    code += sizeof(kEndbr64);
  }
  unsigned warps = 0;
  while (code[warps] == kNop) ++warps;
  return warps > 0 ? warps * kWarp : kMaxThreads;
}

bool FitsShared(const void* kernel, size_t num_bytes) {
  const auto raised = raised_shared_bytes.find(kernel);
  const int limit = raised == raised_shared_bytes.end() ? kDefaultSharedBytes
                                                        : raised->second;
  return num_bytes <= static_cast<size_t>(std::min(limit, max_shared_bytes));
}

void Wait(Waits reason) {
  Fiber& fiber = block.fibers[block.running];
  fiber.waits = reason;
  WeftSwitchFiber(&fiber.stack_pointer, block.scheduler);
}

void RunThread() {
  (*block.thread)();
  // This wait never returns, because the next block starts the fiber anew.
  Wait(Waits::kDone);
}

void StartFiber(Fiber& fiber) {
  if (fiber.stack == nullptr) fiber.stack.reset(new uint64_t[kStackWords]);
  // The frames of the last run were left without a return.
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack.get(),
                              kStackWords * sizeof(uint64_t));
  fiber.waits = Waits::kNot;
  fiber.has_waited_for_grids = false;
  fiber.num_exchanges = 0;
  fiber.ended_copies.clear();
  fiber.copies.clear();
  // Above RunThread's address is the place of a return address, because the ABI
  // aligns the stack before a call.
  uint64_t* top = fiber.stack.get() + kStackWords;
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&RunThread);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.stack_pointer = top;
}

void ResumeUntilItWaits(unsigned thread) {
  block.running = thread;
  threadIdx = {thread, 0, 0};
  WeftSwitchFiber(&block.scheduler, block.fibers[thread].stack_pointer);
}

bool AllWait(unsigned begin, unsigned end, Waits reason) {
  for (unsigned i = begin; i < end; ++i) {
    if (block.fibers[i].waits != reason) return false;
  }
  return true;
}

// If the threads [begin, end) all wait for `reason`, lets them continue and
// returns true.
bool Release(unsigned begin, unsigned end, Waits reason) {
  if (!AllWait(begin, end, reason)) return false;
  for (unsigned i = begin; i < end; ++i) block.fibers[i].waits = Waits::kNot;
  return true;
}

// Runs a warp's lanes until each waits at a barrier of the block or has ended.
void RunWarp(unsigned first, bool forwards) {
  do {
    for (unsigned i = 0; i < kWarp; ++i) {
      const unsigned thread = first + (forwards ? i : kWarp - 1 - i);
      if (block.fibers[thread].waits == Waits::kNot) ResumeUntilItWaits(thread);
    }
    forwards = !forwards;
  } while (Release(first, first + kWarp, Waits::kForWarp));
}

// Ends the process if a thread of the block has ended without a call of
// cudaGridDependencySynchronize.
void ExpectAllWaitedForGrids(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    if (block.fibers[i].has_waited_for_grids) continue;
    std::fputs("cuda_on_host: a launch that may start early does not wait\n",
               stderr);
    std::abort();
  }
}

void RunBlock(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) StartFiber(block.fibers[i]);
  for (bool forwards = true;; forwards = !forwards) {
    for (unsigned i = 0; i < threads; i += kWarp) {
      RunWarp(forwards ? i : threads - kWarp - i, forwards);
    }
    if (AllWait(0, threads, Waits::kDone)) return;
    if (!Release(0, threads, Waits::kForBlock)) {
      std::fputs("cuda_on_host: not all threads reach a barrier\n", stderr);
      std::abort();
    }
  }
}

}  // namespace

void* LaneSlot(unsigned lane, unsigned which) {
  return block.slots[which] + (threadIdx.x / kWarp * kWarp + lane) * kSlotBytes;
}

void CopyLater(const void* from, int num_bytes, void* to, int to_bytes) {
  CheckAlignment(from, to_bytes);
  CheckAlignment(to, to_bytes);
  block.fibers[block.running].copies.push_back(
      {from, static_cast<size_t>(num_bytes), static_cast<char*>(to),
       static_cast<size_t>(to_bytes)});
}

void EndCopyGroup() {
  Fiber& fiber = block.fibers[block.running];
  fiber.ended_copies.push_back(std::exchange(fiber.copies, {}));
}

void WaitForCopies(size_t num_pending) {
  auto& groups = block.fibers[block.running].ended_copies;
  for (; groups.size() > num_pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.to, 0, copy.to_bytes);
      std::memcpy(copy.to, copy.from, copy.num_bytes);
    }
  }
}

void* DynamicShared() { return block.dynamic_shared.get(); }

unsigned NextSlot() { return block.fibers[block.running].num_exchanges++ % 2; }

void MakeQueuedCopies() {
  for (const QueuedCopy& copy : queued_copies) {
    std::memcpy(copy.to, copy.from, copy.num_bytes);
  }
  queued_copies.clear();
}

cudaError_t RaiseDynamicShared(const void* kernel, int num_bytes) {
  if (num_bytes < 0 || num_bytes > max_shared_bytes) {
    return cudaErrorInvalidValue;
  }
  raised_shared_bytes[kernel] = num_bytes;
  return cudaSuccess;
}

cudaError_t RunGrid(const cudaLaunchConfig_t& config, const void* kernel,
                    const std::function<void()>& thread) {
  const dim3 grid = config.gridDim;
  const unsigned threads = config.blockDim.x;
  const bool fits = grid.x >= 1 && grid.y >= 1 && grid.z == 1 &&
                    grid.x <= 2147483647 && grid.y <= 65535 && threads >= 1 &&
                    threads <= kMaxThreads && threads % kWarp == 0 &&
                    config.blockDim.y == 1 && config.blockDim.z == 1;
  if (!fits) return cudaErrorInvalidConfiguration;
  if (threads > MaxThreadsOf(kernel)) return cudaErrorLaunchOutOfResources;
  if (!FitsShared(kernel, config.dynamicSmemBytes)) {
    return cudaErrorInvalidValue;
  }
  MakeQueuedCopies();
  if (block.fibers.size() < threads) block.fibers.resize(kMaxThreads);
  gridDim = grid;
  blockDim = config.blockDim;
  block.thread = &thread;
  block.dynamic_shared.reset(new char[config.dynamicSmemBytes]);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      RunBlock(threads);
      if (config.numAttrs > 0) ExpectAllWaitedForGrids(threads);
    }
  }
  return cudaSuccess;
}

}  // namespace weft::testing::cuda_on_host

namespace host = weft::testing::cuda_on_host;

void __syncthreads() { host::Wait(host::Waits::kForBlock); }
void __syncwarp() { host::Wait(host::Waits::kForWarp); }
void cudaGridDependencySynchronize() {
  host::block.fibers[host::block.running].has_waited_for_grids = true;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int /*device*/) {
  namespace device = weft::testing::cuda_on_host;
  *value = 0;
  if (attribute == cudaDevAttrComputeCapabilityMajor) {
    *value = device::compute_capability_major;
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = device::max_shared_bytes;
  }
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t num_bytes) {
  // The alignment of device memory.
  constexpr size_t kAlignment = 256;
  *data = std::aligned_alloc(
      kAlignment, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  host::MakeQueuedCopies();
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes,
                       cudaMemcpyKind /*kind*/) {
  host::MakeQueuedCopies();
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes,
                            cudaMemcpyKind kind, cudaStream_t /*stream*/) {
  if (num_bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyDeviceToHost) std::memset(to, 0xFF, num_bytes);
  host::queued_copies.push_back(
      {.from = from, .num_bytes = num_bytes, .to = to});
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
  if (host::observer.waits != nullptr) {
    host::observer.waits("cudaStreamSynchronize");
  }
  host::MakeQueuedCopies();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  host::MakeQueuedCopies();
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of cuda_on_host";
}
