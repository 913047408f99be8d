// Loading: options to a running engine, one line per stage.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
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
#include "src/engine/torch_guard.h"
#include "src/model/decoder_weights.h"
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

absl::StatusOr<at::Device> PickDevice(Device device) {
  const bool has_cuda = at::hasCUDA();
  if (device == Device::kCuda && !has_cuda) {
    return absl::FailedPreconditionError(
        "--device=cuda: no CUDA device, or this build has no CUDA");
  }
  if (device == Device::kCpu || !has_cuda) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, 0);
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
  if (options.checkpoint_dir.empty()) options.checkpoint_dir = "checkpoints";
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
    at::ScalarType dtype, at::Device device) {
  if (options.load_format == LoadFormat::kDummy) {
    Log(LogLevel::kWarning, "weights are random: --load-format=dummy");
    return model::MakeDummyWeights(config, dtype, device, kDummySeed);
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(options.model_dir));
  return model::LoadDecoderWeights(*checkpoint, config, dtype, device);
}

absl::StatusOr<std::unique_ptr<model::Decoder>> LoadDecoder(
    EngineOptions& options, at::Device device) {
  WEFT_ASSIGN_OR_RETURN(model::ModelConfig config,
                        model::ReadModelConfig(options.model_dir));
  if (options.max_context_tokens == 0 ||
      options.max_context_tokens > config.max_positions) {
    options.max_context_tokens = static_cast<int>(config.max_positions);
  }
  const at::ScalarType dtype = PickDtype(options.dtype, device);
  absl::StatusOr<model::DecoderWeights> loaded = absl::InternalError("not run");
  std::unique_ptr<model::Decoder> decoder;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("loading the model", [&] {
    loaded = LoadWeights(options, config, dtype, device);
    if (!loaded.ok()) return;
    decoder = std::make_unique<model::Decoder>(config, *std::move(loaded),
                                               options.max_context_tokens);
  }));
  WEFT_RETURN_IF_ERROR(loaded.status());
  return decoder;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> StartEngine(
    const EngineOptions& options, prometheus::Registry* registry) {
  const absl::Time start = absl::Now();
  WEFT_RETURN_IF_ERROR(ParseTenantWeights(options.tenant_weights).status());
  engine::EngineParts parts{.options = options};
  WEFT_ASSIGN_OR_RETURN(const at::Device device, PickDevice(options.device));
  if (options.num_threads > 0) at::set_num_threads(options.num_threads);
  FillDefaults(parts.options, device);
  WEFT_RETURN_IF_ERROR(PrepareDirectory(parts.options.checkpoint_dir));
  WEFT_ASSIGN_OR_RETURN(
      SpillFolder spill,
      SpillFolder::Open(parts.options.checkpoint_dir + "/.spill"));
  parts.spill = std::make_unique<SpillFolder>(std::move(spill));
  WEFT_ASSIGN_OR_RETURN(parts.decoder, LoadDecoder(parts.options, device));
  if (parts.options.memory_budget_bytes == 0 && device.is_cpu()) {
    parts.options.memory_budget_bytes = engine::DefaultHostBudget();
  }

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
       {"seconds", absl::ToDoubleSeconds(absl::Now() - start)}});

  std::unique_ptr<Engine> engine;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("starting the engine", [&] {
    engine = std::make_unique<engine::EngineImpl>(std::move(parts), registry);
  }));
  return engine;
}

}  // namespace weft
