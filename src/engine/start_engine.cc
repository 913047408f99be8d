// Loading: options to a running engine, or to a rank that follows one, one line
// per stage.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/engine/activation_budget.h"
#include "src/engine/engine_impl.h"
#include "src/engine/head_options.h"
#include "src/engine/torch_guard.h"
#include "src/group/follower.h"
#include "src/model/decoder_weights.h"
#include "src/model/model_shard.h"
#include "src/parallel/links.h"
#include "src/weights/checkpoint.h"

namespace weft {
namespace {

// Micro-batches long enough for full GEMM rate, short enough that nobody waits
// long for a running one.
constexpr int64_t kCpuBatchTokens = 2048;
constexpr int64_t kCudaBatchTokens = 16384;
constexpr int64_t kCpuKvBytes = int64_t{1} << 30;
constexpr int64_t kCudaKvBytes = int64_t{8} << 30;
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
  const auto index = static_cast<at::DeviceIndex>(local_rank);
  at::detail::getCUDAHooks().setCurrentDevice(index);
  return at::Device(at::kCUDA, index);
}

at::ScalarType PickDtype(Dtype dtype, at::Device device) {
  if (dtype == Dtype::kAuto) {
    return device.is_cuda() ? at::kBFloat16 : at::kFloat;
  }
  return dtype == Dtype::kBf16 ? at::kBFloat16 : at::kFloat;
}

std::string LastPathPart(const std::string& path) {
  const std::filesystem::path normal =
      std::filesystem::path(path).lexically_normal();
  return normal.has_filename() ? normal.filename().string()
                               : normal.parent_path().filename().string();
}

void FillDefaults(EngineOptions& options, at::Device device) {
  const bool cuda = device.is_cuda();
  if (options.max_batch_tokens == 0) {
    options.max_batch_tokens = cuda ? kCudaBatchTokens : kCpuBatchTokens;
  }
  if (options.kv_cache_bytes == 0) {
    options.kv_cache_bytes = cuda ? kCudaKvBytes : kCpuKvBytes;
  }
  if (options.adapter_host_bytes == 0 && cuda) {
    options.adapter_host_bytes = engine::DefaultHostBudget() / 2;
  }
  // On the CPU a buffer would take the memory that the adapter has given back.
  options.adapter_host_bytes = std::max<int64_t>(options.adapter_host_bytes, 0);
  if (options.max_adapters_per_tenant == 0) {
    options.max_adapters_per_tenant = options.max_adapters;
  }
  const auto quarter = [](int64_t& limit, int64_t of_all) {
    if (limit == 0) limit = std::max<int64_t>(of_all / 4, 1);
  };
  quarter(options.max_queue_requests_per_tenant, options.max_queue_requests);
  quarter(options.max_queue_tokens_per_tenant, options.max_queue_tokens);
}

EngineInfo MakeInfo(const EngineOptions& options, const model::Decoder& decoder,
                    bool has_byte_decoder) {
  const model::ModelConfig& config = decoder.config();
  return {.device = decoder.device().is_cuda() ? "cuda" : "cpu",
          .dtype = decoder.weights().embedding_VH.scalar_type() == at::kBFloat16
                       ? "bf16"
                       : "f32",
          .architecture = config.model_type,
          .num_layers = config.num_layers,
          .hidden_size = static_cast<int>(config.hidden),
          .vocab_size = static_cast<int>(config.vocab),
          .context_length = options.max_context_tokens,
          .eos_token_ids = config.eos_token_ids,
          .num_parameters = config.num_parameters(),
          .max_adapters = options.max_adapters,
          .max_rank = options.max_rank,
          .has_byte_decoder = has_byte_decoder};
}

absl::Status PrepareDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || access(path.c_str(), W_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--checkpoint-dir=", path, " cannot be created or written"));
  }
  return absl::OkStatus();
}

absl::StatusOr<model::DecoderWeights> LoadWeights(
    const EngineOptions& options, const model::ModelConfig& config,
    at::ScalarType dtype, at::Device device, const parallel::Shard& shard) {
  if (options.load_format == LoadFormat::kDummy) {
    Log(LogLevel::kWarning, "weights are random: --load-format=dummy");
    return model::MakeDummyWeights(config, dtype, device, kDummySeed, shard);
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(options.model_dir));
  return model::LoadDecoderWeights(*checkpoint, config, dtype, device, shard);
}

absl::StatusOr<std::unique_ptr<model::Decoder>> LoadDecoder(
    EngineOptions& options, const model::ModelConfig& config, at::Device device,
    const parallel::Links& links) {
  const parallel::Shard shard = links.topology.ShardOf(links.rank);
  if (options.max_context_tokens == 0 ||
      options.max_context_tokens > config.max_positions) {
    options.max_context_tokens = static_cast<int>(config.max_positions);
  }
  const at::ScalarType dtype = PickDtype(options.dtype, device);
  absl::StatusOr<model::DecoderWeights> loaded = absl::InternalError("not run");
  std::unique_ptr<model::Decoder> decoder;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("loading the model", [&] {
    loaded = LoadWeights(options, config, dtype, device, shard);
    if (!loaded.ok()) return;
    decoder = std::make_unique<model::Decoder>(config, *std::move(loaded),
                                               options.max_context_tokens,
                                               links.tensor.get());
  }));
  WEFT_RETURN_IF_ERROR(loaded.status());
  return decoder;
}

// A rank with its part of the model.
struct LoadedRank {
  EngineOptions options;  // With defaults filled in.
  parallel::Links links;
  std::unique_ptr<model::Decoder> decoder;
};

// Compute threads of one of several ranks on a machine must not be more than
// its cores.
void SetThreads(int wanted, int local_size) {
  if (wanted == 0 && local_size > 1) {
    wanted = std::max(1, at::get_num_threads() / local_size);
  }
  if (wanted > 0) at::set_num_threads(wanted);
}

// Returns when every rank has its part.
absl::StatusOr<LoadedRank> LoadRank(const EngineOptions& options,
                                    const World& world) {
  LoadedRank rank{.options = options};
  WEFT_ASSIGN_OR_RETURN(const at::Device device,
                        PickDevice(options.device, world.local_rank));
  SetThreads(options.num_threads, world.local_size);
  FillDefaults(rank.options, device);
  WEFT_ASSIGN_OR_RETURN(const model::ModelConfig config,
                        model::ReadModelConfig(options.model_dir));
  WEFT_RETURN_IF_ERROR(
      model::CheckTensorParallelSize(config, options.tensor_parallel_size));
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("meeting the other ranks", [&] {
    rank.links = parallel::Join(world,
                                {.tensor_size = options.tensor_parallel_size,
                                 .num_replicas = options.data_parallel_size},
                                device);
  }));
  WEFT_ASSIGN_OR_RETURN(rank.decoder,
                        LoadDecoder(rank.options, config, device, rank.links));
  if (!rank.links.alone()) {
    WEFT_RETURN_IF_ERROR(engine::RunGuarded("waiting for the other ranks", [&] {
      at::Tensor loaded = at::ones({1});
      rank.links.commands->AllReduce(loaded);
    }));
  }
  // Of what all ranks of the machine leave.
  if (rank.options.memory_budget_bytes == 0 && device.is_cpu()) {
    rank.options.memory_budget_bytes =
        engine::DefaultHostBudget() / world.local_size;
  }
  return rank;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> StartEngine(
    const EngineOptions& options, const World& world,
    prometheus::Registry* registry) {
  const absl::Time start = absl::Now();
  WEFT_RETURN_IF_ERROR(ParseTenantWeights(options.tenant_weights).status());
  EngineOptions chosen = options;
  if (chosen.checkpoint_dir.empty()) chosen.checkpoint_dir = "checkpoints";
  WEFT_RETURN_IF_ERROR(PrepareDirectory(chosen.checkpoint_dir));
  WEFT_ASSIGN_OR_RETURN(SpillFolder spill,
                        SpillFolder::Open(chosen.checkpoint_dir + "/.spill"));
  WEFT_ASSIGN_OR_RETURN(LoadedRank rank, LoadRank(chosen, world));
  engine::EngineParts parts{
      .options = std::move(rank.options),
      .links = std::move(rank.links),
      .decoder = std::move(rank.decoder),
      .spill = std::make_unique<SpillFolder>(std::move(spill))};

  absl::StatusOr<sampling::TokenBytes> token_bytes =
      sampling::TokenBytes::Load(options.model_dir);
  if (token_bytes.ok()) {
    parts.token_bytes =
        std::make_unique<sampling::TokenBytes>(*std::move(token_bytes));
  } else {
    Log(LogLevel::kWarning, "byte-string stops are off",
        {{"reason", token_bytes.status().message()}});
  }
  parts.model_name = LastPathPart(options.model_dir);
  parts.info =
      MakeInfo(parts.options, *parts.decoder, parts.token_bytes != nullptr);
  Log(LogLevel::kInfo, "model loaded",
      {{"model", parts.model_name},
       {"architecture", parts.info.architecture},
       {"parameters", parts.info.num_parameters},
       {"device", parts.info.device},
       {"dtype", parts.info.dtype},
       {"threads", at::get_num_threads()},
       {"ranks", world.size},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - start)}});

  std::unique_ptr<Engine> engine;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("starting the engine", [&] {
    engine = std::make_unique<engine::EngineImpl>(std::move(parts), registry);
  }));
  return engine;
}

absl::Status FollowEngine(const EngineOptions& options, const World& world) {
  WEFT_ASSIGN_OR_RETURN(LoadedRank rank, LoadRank(options, world));
  Log(LogLevel::kInfo, "rank ready",
      {{"rank", world.rank}, {"threads", at::get_num_threads()}});
  return engine::RunGuarded("following rank 0", [&] {
    group::Follower(*rank.decoder,
                    engine::HeadOptionsOf(rank.options, *rank.decoder),
                    &rank.links)
        .Run();
  });
}

}  // namespace weft
