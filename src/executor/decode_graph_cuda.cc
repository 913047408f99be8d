// Implements StepDevice with CUDA graphs. It does not use at::cuda::CUDAGraph,
// which leaves the allocator inside the graph's pool after a failed capture. A
// failed capture must cost only its own graph.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "src/executor/decode_graph.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::executor {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// While this object exists, allocations on `stream` come from `pool`. So work
// outside of graphs never gets memory that a graph writes to.
class InPool {
 public:
  InPool(c10::DeviceIndex device, at::cuda::MempoolId_t pool,
         cudaStream_t stream)
      : device_(device), pool_(pool) {
    allocator::beginAllocateToPool(
        device, pool, [stream](cudaStream_t other) { return other == stream; });
  }
  ~InPool() { allocator::endAllocateToPool(device_, pool_); }
  InPool(const InPool&) = delete;
  InPool& operator=(const InPool&) = delete;

 private:
  const c10::DeviceIndex device_;
  const at::cuda::MempoolId_t pool_;
};

class CudaGraph final : public StepGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, at::Tensor result)
      : graph_(graph), result_(std::move(result)) {}
  // Ignores the status, because it is an error only if the device is lost. A
  // lost device has nothing to free.
  ~CudaGraph() override { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  at::Tensor Replay() override {
    C10_CUDA_CHECK(cudaGraphLaunch(graph_, ops::cuda::CurrentStream()));
    return result_;
  }

 private:
  const cudaGraphExec_t graph_;
  const at::Tensor result_;
};

// Returns a view that does not keep the memory. The pool can then give a result
// to the next graph, too. It keeps the memory as long as the StepDevice exists.
at::Tensor WithoutOwner(const at::Tensor& tensor) {
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options())
      .target_device(tensor.device())
      .make_tensor();
}

// Captures the launches that `step` queues on `stream`, and sets *result to the
// result without an owner. The caller destroys the graph.
cudaGraph_t Capture(const StepFunction& step, cudaStream_t stream,
                    at::Tensor* result) {
  // The capture is thread-local, because other threads may allocate and copy
  // during the capture.
  C10_CUDA_CHECK(
      cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    *result = WithoutOwner(step());
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  C10_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

class CudaStepDevice final : public StepDevice {
 public:
  explicit CudaStepDevice(at::Device device)
      : device_(device),
        pool_(at::cuda::graph_pool_handle()),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                             device.index())) {}
  ~CudaStepDevice() override {
    for (; num_pools_ > 0; --num_pools_) {
      allocator::get()->releasePool(device_.index(), pool_);
    }
  }
  CudaStepDevice(const CudaStepDevice&) = delete;
  CudaStepDevice& operator=(const CudaStepDevice&) = delete;

  void Run(const StepFunction& step) override {
    const auto run = [&] {
      OnStream([&](cudaStream_t /*stream*/) { step(); });
    };
    try {
      run();
      return;
    } catch (const c10::OutOfMemoryError&) {
      // Frees the memory that the allocator has cached for other pools, so that
      // this pool can get it.
      allocator::emptyCache();
    }
    run();
  }

  std::unique_ptr<StepGraph> Record(const StepFunction& step) override {
    std::unique_ptr<StepGraph> recorded;
    OnStream([&](cudaStream_t stream) {
      at::Tensor result;
      cudaGraph_t const graph = Capture(step, stream, &result);
      cudaGraphExec_t ready = nullptr;
      const cudaError_t made = cudaGraphInstantiate(&ready, graph, /*flags=*/0);
      static_cast<void>(cudaGraphDestroy(graph));
      C10_CUDA_CHECK(made);
      recorded = std::make_unique<CudaGraph>(ready, std::move(result));
      C10_CUDA_CHECK(cudaGraphUpload(ready, stream));
    });
    return recorded;
  }

  int64_t FreeBytes() override {
    return static_cast<int64_t>(
        allocator::get()->getMemoryInfo(device_.index()).first);
  }

  at::Tensor HostBuffer(int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  }

  void Upload(const at::Tensor& host, int64_t bytes,
              const at::Tensor& device) override {
    ops::cuda::QueueUpload(host.const_data_ptr(), bytes,
                           device.mutable_data_ptr());
  }

 private:
  // Runs work(stream_) with allocations from pool_. Before that, waits for all
  // work on the current stream. Afterwards, waits for stream_.
  template <typename Work>
  void OnStream(const Work& work) {
    ops::cuda::WaitForStream();
    const c10::cuda::CUDAStreamGuard on_stream(stream_);
    ++num_pools_;
    const InPool in_pool(device_.index(), pool_, stream_.stream());
    try {
      work(stream_.stream());
    } catch (...) {
      // The caller may continue on another stream. So the work on this stream
      // must end before the exception reaches the caller.
      static_cast<void>(cudaStreamSynchronize(stream_.stream()));
      throw;
    }
    ops::cuda::WaitForStream();
  }

  const at::Device device_;
  const at::cuda::MempoolId_t pool_;
  const c10::cuda::CUDAStream stream_;  // Captures run on this stream.
  int num_pools_ = 0;                   // References to pool_, one per InPool.
};

}  // namespace

std::unique_ptr<StepDevice> MakeCudaStepDevice(at::Device device) {
  return std::make_unique<CudaStepDevice>(device);
}

}  // namespace weft::executor
