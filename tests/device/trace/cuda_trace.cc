// A library that records what a CUDA program spends the device's time on,
// without a profiler. CUDA loads the library into any process:
//
//   CUDA_INJECTION64_PATH=libcuda_trace.so CUDA_TRACE_FILE=run weftd ...
//
// The library writes run.PID.csv until the process ends, with one line for each
// kernel, copy and memset. The columns are kind, start and end in ns, stream,
// grid, block, registers of a thread, bytes (of shared memory, or moved), and
// name. cuda_trace.py adds the lines up. Each kernel of a replayed graph has
// its own line.
#include <cupti.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
std::FILE* output = nullptr;

void CUPTIAPI MakeBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *size = size_t{8} << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
  *max_records = 0;  // CUPTI then writes as many records as fit.
}

void WriteKernel(const CUpti_ActivityKernel10& kernel) {
  std::fprintf(
      output,
      "kernel,%" PRIu64 ",%" PRIu64 ",%u,%dx%dx%d,%dx%dx%d,%d,%d,\"%s\"\n",
      kernel.start, kernel.end, kernel.streamId, kernel.gridX, kernel.gridY,
      kernel.gridZ, kernel.blockX, kernel.blockY, kernel.blockZ,
      kernel.registersPerThread,
      kernel.staticSharedMemory + kernel.dynamicSharedMemory, kernel.name);
}

void WriteBytes(const char* kind, uint64_t start, uint64_t end, uint32_t stream,
                uint64_t bytes, int way) {
  std::fprintf(output,
               "%s,%" PRIu64 ",%" PRIu64 ",%u,,,,%" PRIu64 ",\"kind %d\"\n",
               kind, start, end, stream, bytes, way);
}

void Write(const CUpti_Activity& record) {
  switch (record.kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      WriteKernel(reinterpret_cast<const CUpti_ActivityKernel10&>(record));
      return;
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& copy = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
      WriteBytes("memcpy", copy.start, copy.end, copy.streamId, copy.bytes,
                 copy.copyKind);
      return;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto& set = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
      WriteBytes("memset", set.start, set.end, set.streamId, set.bytes,
                 set.memoryKind);
      return;
    }
    default:
      return;
  }
}

// CUPTI calls this function on CUPTI's own thread.
void CUPTIAPI TakeBuffer(CUcontext /*context*/, uint32_t /*stream*/,
                         uint8_t* buffer, size_t /*size*/, size_t valid_size) {
  const std::lock_guard<std::mutex> lock(mutex);
  CUpti_Activity* record = nullptr;
  while (output != nullptr &&
         cuptiActivityGetNextRecord(buffer, valid_size, &record) ==
             CUPTI_SUCCESS) {
    Write(*record);
  }
  std::free(buffer);
}

void WriteTheRest() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const std::lock_guard<std::mutex> lock(mutex);
  if (output != nullptr) std::fclose(output);
  output = nullptr;
}

}  // namespace

// CUDA calls this in the library that CUDA_INJECTION64_PATH names. Returns 1 to
// continue.
extern "C" int InitializeInjection() {
  const char* name = std::getenv("CUDA_TRACE_FILE");
  if (name == nullptr) return 1;
  const std::string path =
      std::string(name) + "." + std::to_string(getpid()) + ".csv";
  output = std::fopen(path.c_str(), "w");
  if (output == nullptr) return 1;
  cuptiActivityRegisterCallbacks(MakeBuffer, TakeBuffer);
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
        CUPTI_ACTIVITY_KIND_MEMSET}) {
    cuptiActivityEnable(kind);
  }
  std::atexit(WriteTheRest);
  return 1;
}
