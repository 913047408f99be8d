#include "src/engine/start/load_rank.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/cgroup.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/device/host_allocator.h"
#include "src/engine/start/memory_plan.h"
#include "src/engine/train/activation_budget.h"
#include "src/loss/allocation_limit.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_shard.h"
#include "src/ops/matmul.h"
#include "src/parallel/communicator.h"
#include "src/weights/checkpoint.h"

namespace weft::engine {
namespace {

// The default micro-batch on a CPU: long enough for the full GEMM rate, short
// enough that other requests do not wait long.
constexpr int64_t kCpuBatchTokens = 2048;
constexpr int64_t kCpuKvBytes = int64_t{1} << 30;
constexpr uint64_t kDummySeed = 1;

absl::StatusOr<at::Device> PickDevice(Device device, int local_rank) {
  const bool has_cuda = at::hasCUDA();
  if (device == Device::kCuda && !has_cuda) {
    return absl::FailedPreconditionError(
        "--device=cuda: no CUDA device, or this build has no CUDA");
  }
  if (device == Device::kCpu || !has_cuda) return at::Device(at::kCPU);
  const auto num_devices = at::detail::getCUDAHooks().deviceCount();
  if (local_rank >= num_devices) {
    return absl::FailedPreconditionError(
        absl::StrCat("LOCAL_RANK=", local_rank, ": this machine has ",
                     static_cast<int>(num_devices), " CUDA devices"));
  }
  // Makes cuBLAS add the parts of a split sum in f32, so that products with few
  // rows and products with many rows are rounded alike.
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank));
}

at::ScalarType PickDtype(Dtype dtype, at::Device device) {
  if (dtype == Dtype::kAuto) {
    return device.is_cuda() ? at::kBFloat16 : at::kFloat;
  }
  return dtype == Dtype::kBf16 ? at::kBFloat16 : at::kFloat;
}

// Chooses whether a CPU computes products with bf16 weights in bf16 or in f32.
void SetCpuArithmetic(const EngineOptions& options, at::ScalarType dtype,
                      at::Device device) {
  const bool is_bf16 = device.is_cpu() && dtype == at::kBFloat16;
  const bool computes_in_bf16 =
      ops::AllowBf16Products(is_bf16 && options.cpu_bf16 == CpuBf16::kAuto);
  if (!is_bf16) return;
  Log(LogLevel::kInfo, "bf16 weights on a CPU",
      {{"arithmetic", computes_in_bf16 ? "bf16 with f32 sums" : "f32"},
       {"cpu_bf16", options.cpu_bf16 == CpuBf16::kAuto ? "auto" : "off"},
       {"has_avx512_bf16", ops::HasBf16Instructions() ? "yes" : "no"}});
}

void FillTenantDefaults(EngineOptions& options) {
  if (options.max_adapters_per_tenant == 0) {
    options.max_adapters_per_tenant = options.max_adapters;
  }
}

// Sets defaults for ranks on the CPU. All ranks of the machine share its free
// memory.
void FillHostDefaults(int local_size, EngineOptions& options) {
  if (options.max_batch_tokens == 0) options.max_batch_tokens = kCpuBatchTokens;
  if (options.kv_cache_bytes == 0) options.kv_cache_bytes = kCpuKvBytes;
  if (options.max_resident_adapters == 0) {
    options.max_resident_adapters = kDefaultResidentAdapters;
  }
  if (options.memory_budget_bytes == 0) {
    const HostBudget budget = DefaultHostBudget();
    options.memory_budget_bytes = budget.bytes / local_size;
    Log(LogLevel::kInfo, "memory budget of activations",
        {{"bytes", options.memory_budget_bytes}, {"source", budget.source}});
  }
  // A CPU rank computes in host memory. So by default an adapter that must make
  // room moves to disk: a copy in host memory would free nothing.
  options.adapter_host_bytes = std::max<int64_t>(options.adapter_host_bytes, 0);
}

absl::StatusOr<model::DecoderWeights> LoadWeights(
    const EngineOptions& options, const model_config::ModelConfig& config,
    at::ScalarType dtype, at::Device device, const parallel::Shard& shard) {
  const model_config::MatrixFormat format = MatrixFormatOf(options);
  if (options.load_format == LoadFormat::kDummy) {
    Log(LogLevel::kWarning, "weights are random: --load-format=dummy");
    return model::MakeDummyWeights(config, dtype, device, kDummySeed, shard,
                                   format);
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(options.model_dir));
  return model::LoadDecoderWeights(*checkpoint, config, dtype, device, shard,
                                   format);
}

absl::StatusOr<std::unique_ptr<model::Decoder>> LoadDecoder(
    EngineOptions& options, const model_config::ModelConfig& config,
    at::Device device, const parallel::Links& links) {
  const parallel::Shard shard = links.topology.ShardOf(links.rank);
  WEFT_ASSIGN_OR_RETURN(options.max_context_tokens,
                        ContextTokens(options, config));
  const at::ScalarType dtype = PickDtype(options.dtype, device);
  if (device.is_cuda()) WEFT_RETURN_IF_ERROR(CheckCudaFormat(options));
  SetCpuArithmetic(options, dtype, device);
  if (device.is_cpu()) HostAllocator::Install();
  loss::AllocationLimit::Install();
  absl::StatusOr<model::DecoderWeights> loaded = absl::InternalError("not run");
  std::unique_ptr<model::Decoder> decoder;
  WEFT_RETURN_IF_ERROR(RunGuarded("loading the model", [&] {
    loaded = LoadWeights(options, config, dtype, device, shard);
    if (!loaded.ok()) return;
    decoder = std::make_unique<model::Decoder>(config, *std::move(loaded),
                                               options.max_context_tokens,
                                               links.tensor.get());
  }));
  WEFT_RETURN_IF_ERROR(loaded.status());
  return decoder;
}

// Sets the number of compute threads. If `wanted` is 0, all ranks of a machine
// together use about as many threads as one rank would use alone: one for each
// processor that the affinity and the control groups' quota allow. More threads
// than the quota would wait for each other while they are throttled.
void SetThreads(int wanted, int local_size) {
  if (wanted == 0) {
    wanted = at::get_num_threads();
    if (const auto cpus = ReadCgroupLimits().cpus; cpus && *cpus < wanted) {
      wanted = static_cast<int>(*cpus);
    }
    wanted = std::max(1, wanted / local_size);
  }
  at::set_num_threads(wanted);
}

// The facts that a rank finds before it meets the other ranks.
struct LocalFacts {
  at::Device device = at::kCPU;
  std::unique_ptr<ComputeDevice> compute;
  model_config::ModelConfig config;
};

absl::StatusOr<LocalFacts> FindLocalFacts(const EngineOptions& options,
                                          const World& world) {
  LocalFacts facts;
  absl::StatusOr<at::Device> device = at::Device(at::kCPU);
  WEFT_RETURN_IF_ERROR(RunGuarded("taking the device", [&] {
    device = PickDevice(options.device, world.local_rank);
    if (device.ok()) facts.compute = MakeComputeDevice(*device);
  }));
  WEFT_ASSIGN_OR_RETURN(facts.device, std::move(device));
  WEFT_ASSIGN_OR_RETURN(facts.config,
                        model_config::ReadModelConfig(options.model_dir));
  WEFT_RETURN_IF_ERROR(model_config::SetExpertParallelSize(
      options.expert_parallel_size, options.tensor_parallel_size,
      facts.config));
  WEFT_RETURN_IF_ERROR(model_config::CheckTensorParallelSize(
      facts.config, options.tensor_parallel_size));
  return facts;
}

// Returns the error of the first rank that has one, or OK. `own` is this rank's
// status. Returns an error, too, if the ranks cannot exchange their statuses.
absl::Status AgreeOn(const parallel::Links& links, const absl::Status& own) {
  if (links.alone()) return own;
  absl::Status all;
  WEFT_RETURN_IF_ERROR(RunGuarded("waiting for the other ranks", [&] {
    all = parallel::Agree(*links.commands, own);
  }));
  return all;
}

void LogSplit(const MemorySplit& split, int64_t total, int64_t available,
              int64_t largest_adapter) {
  Log(LogLevel::kInfo, "device memory",
      {{"total_bytes", total},
       {"model_bytes", split.model},
       {"left_by_model_bytes", available},
       {"resident_adapters", split.num_adapters},
       {"bytes_of_the_largest_adapter", largest_adapter},
       {"adapter_bytes", split.adapters},
       {"adapters_limited_by", NameOf(split.adapters_limit)},
       {"kv_cache_bytes", split.cache},
       {"kv_cache_limited_by", NameOf(split.cache_limit)},
       {"activation_bytes", split.activations},
       {"max_batch_tokens", split.batch_tokens},
       {"recomputed_layers", split.recomputed_layers},
       {"batch_limited_by", NameOf(split.batch_limit)},
       {"decode_graph_bytes", split.decode_graphs},
       {"decode_graphs_limited_by", NameOf(split.graphs_limit)},
       {"reserve_bytes", split.reserve}});
}

// All ranks call this function together. Each rank limits its device memory.
// Rank 0 then plans the memory's use, for the rank with the least free memory.
absl::Status PlanDevice(LoadedRank& rank) {
  int64_t available = 0;
  WEFT_RETURN_IF_ERROR(AgreeOn(
      rank.links, RunGuarded("asking the device for its memory", [&] {
        available = rank.device->LimitTo(rank.options.device_memory_share);
      })));
  if (!rank.links.alone()) {
    WEFT_RETURN_IF_ERROR(RunGuarded("comparing the ranks' devices", [&] {
      available = parallel::Smallest(*rank.links.commands, available);
    }));
  }
  const ModelSizes sizes = SizesOf(*rank.decoder);
  absl::StatusOr<MemorySplit> split = MemorySplit();
  if (rank.links.rank == 0) {
    split = PlanMemory(sizes, available, &rank.options);
  }
  WEFT_RETURN_IF_ERROR(AgreeOn(rank.links, split.status()));
  if (rank.links.rank > 0) return absl::OkStatus();
  const DeviceMemory device = rank.device->Memory();
  split->model = device.allocated;
  rank.memory = *split;
  if (rank.options.adapter_host_bytes == 0) {
    rank.options.adapter_host_bytes = DefaultHostBudget().bytes / 2;
  }
  rank.options.adapter_host_bytes =
      std::max<int64_t>(rank.options.adapter_host_bytes, 0);
  LogSplit(*split, device.total, available,
           LargestAdapterBytes(sizes, rank.options.max_rank));
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckDevice(const EngineOptions& options, int local_rank) {
  WEFT_ASSIGN_OR_RETURN(const at::Device device,
                        PickDevice(options.device, local_rank));
  return device.is_cuda() ? CheckCudaFormat(options) : absl::OkStatus();
}

absl::StatusOr<LoadedRank> LoadRank(const EngineOptions& options,
                                    const World& world,
                                    const std::function<void()>& met) {
  LoadedRank rank{.options = options};
  FillTenantDefaults(rank.options);
  absl::StatusOr<LocalFacts> facts = FindLocalFacts(options, world);
  if (!facts.ok()) {
    // If this process started all other ranks, those ranks end with this
    // process. So this process need not meet them to report the error.
    if (world.size == 1 || world.listen_fd >= 0) return facts.status();
    Log(LogLevel::kError, "the rank cannot load; it tells the others",
        {{"rank", world.rank}, {"error", facts.status().message()}});
  }
  SetThreads(options.num_threads, world.local_size);
  if (facts.ok() && facts->device.is_cpu() && world.size > 1 && world.local()) {
    parallel::YieldToSenders();
  }
  WEFT_RETURN_IF_ERROR(RunGuarded("meeting the other ranks", [&] {
    rank.links =
        parallel::Meet(world, {.tensor_size = options.tensor_parallel_size,
                               .num_replicas = options.data_parallel_size});
  }));
  if (met) met();
  WEFT_RETURN_IF_ERROR(AgreeOn(rank.links, facts.status()));
  WEFT_RETURN_IF_ERROR(RunGuarded("joining the other ranks", [&] {
    parallel::JoinOn(facts->device, &rank.links);
  }));
  absl::StatusOr<std::unique_ptr<model::Decoder>> decoder =
      LoadDecoder(rank.options, facts->config, facts->device, rank.links);
  WEFT_RETURN_IF_ERROR(AgreeOn(rank.links, decoder.status()));
  rank.decoder = *std::move(decoder);
  rank.device = std::move(facts->compute);
  if (facts->device.is_cpu()) {
    FillHostDefaults(world.local_size, rank.options);
  } else {
    WEFT_RETURN_IF_ERROR(PlanDevice(rank));
  }
  return rank;
}

}  // namespace weft::engine
