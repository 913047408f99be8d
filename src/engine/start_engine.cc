// Starts an engine on rank 0, or the worker of another rank.
#include <ATen/Parallel.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/model_fingerprint.h"
#include "src/engine/decode/head_options.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/engine_impl.h"
#include "src/engine/start/load_rank.h"
#include "src/engine/start/open_state.h"
#include "src/executor/message.h"
#include "src/executor/remote_worker.h"

namespace weft::engine {
namespace {

std::string LastPathPart(const std::string& path) {
  const std::filesystem::path normal =
      std::filesystem::path(path).lexically_normal();
  return normal.has_filename() ? normal.filename().string()
                               : normal.parent_path().filename().string();
}

// Returns the name of the type of the base weights.
std::string DtypeOf(const EngineOptions& options,
                    const model::Decoder& decoder) {
  if (options.base_weights == BaseWeights::kInt8) return "int8";
  return decoder.weights().embedding_VH.scalar_type() == at::kBFloat16 ? "bf16"
                                                                       : "f32";
}

EngineInfo MakeInfo(const EngineOptions& options, const model::Decoder& decoder,
                    bool has_byte_decoder) {
  const model_config::ModelConfig& config = decoder.config();
  return {.device = decoder.device().is_cuda() ? "cuda" : "cpu",
          .dtype = DtypeOf(options, decoder),
          .architecture = config.model_type,
          .num_layers = config.num_layers,
          .hidden_size = static_cast<int>(config.hidden),
          .vocab_size = static_cast<int>(config.vocab),
          .context_length = options.max_context_tokens,
          .eos_token_ids = config.eos_token_ids,
          .num_parameters = config.num_parameters(),
          .num_experts = config.moe.shape.count,
          .experts_per_token = config.moe.shape.per_token,
          .expert_layers = config.moe.shape.num_layers(),
          .projections = lora::ProjectionsOf(config.shape()),
          .max_adapters = options.max_adapters,
          .max_adapters_per_tenant = options.max_adapters_per_tenant,
          .max_adapter_bytes_per_tenant =
              static_cast<uint64_t>(options.max_adapter_bytes_per_tenant),
          .max_rank = options.max_rank,
          .replay_window = dispatch::kReplayWindow,
          .has_byte_decoder = has_byte_decoder,
          .keeps_sample_records = options.sample_record_bytes > 0};
}

// Returns the metrics of the disks on which the engine writes. They have values
// from the start, so that no scrape misses them.
std::unique_ptr<DiskMetrics> MakeDiskMetrics(const EngineOptions& options,
                                             const SpillFolder& spill,
                                             prometheus::Registry* registry) {
  std::vector<WatchedFolder> folders = {
      {.label = "spill", .path = spill.path()}};
  if (options.state.empty()) {
    folders.push_back({.label = "checkpoints", .path = options.checkpoint_dir});
  }
  if (!options.state_dir.empty()) {
    folders.push_back({.label = "state", .path = options.state_dir});
  }
  auto disks = std::make_unique<DiskMetrics>(registry, std::move(folders));
  disks->Refresh();
  return disks;
}

absl::Status PrepareDirectory(const std::string& path) {
  std::error_code error;
  if (std::filesystem::create_directories(path, error)) {
    // The names of tenants and adapters are nobody else's business.
    std::filesystem::permissions(path, std::filesystem::perms::owner_all,
                                 error);
  }
  if (error || access(path.c_str(), W_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--checkpoint-dir=", path, " cannot be created or written"));
  }
  return absl::OkStatus();
}

lora::BaseModel BaseOf(const EngineOptions& options,
                       const model::Decoder& decoder, std::string fingerprint) {
  const bool is_random = options.load_format == LoadFormat::kDummy;
  return {.name = LastPathPart(options.model_dir),
          .fingerprint = std::move(fingerprint),
          .shape = decoder.config().shape(),
          .model_dir = is_random ? "" : options.model_dir,
          .accepts_change = options.accept_base_model_change};
}

// Returns a callback that also sends a message to the other ranks, which count
// rank 0 as lost if it is silent for minutes.
OnStandby StandBy(const OnStandby& on_standby, parallel::Links* links) {
  return [&on_standby, links](const std::string& owner) {
    on_standby(owner);
    if (links->alone()) return;
    engine::RunGuarded("greeting the other ranks", [links] {
      executor::SendMessage(executor::DropVersions(), *links->commands);
    }).IgnoreError();
  };
}

void GiveState(engine::OpenedState opened, prometheus::Registry* registry,
               engine::EngineParts* parts) {
  parts->checkpoints = engine::OpenCheckpoints(opened, parts->options);
  parts->directory = engine::OpenAdapterDirectory(opened, parts->options);
  parts->members = engine::OpenMembers(opened, parts->options, registry);
  parts->bucket_metrics = std::move(opened.metrics);
  parts->state = std::move(opened.state);
  parts->running = std::move(opened.running);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> StartEngine(
    const EngineOptions& options, const World& world,
    prometheus::Registry* registry, const OnStandby& on_standby) {
  const absl::Time start = SteadyNow();
  WEFT_RETURN_IF_ERROR(ParseTenantWeights(options.tenant_weights).status());
  EngineOptions chosen = options;
  WEFT_RETURN_IF_ERROR(PrepareDirectory(chosen.checkpoint_dir));
  WEFT_ASSIGN_OR_RETURN(SpillFolder spill,
                        SpillFolder::Open(chosen.spill_root()));
  absl::StatusOr<std::string> fingerprint = engine::ModelFingerprint(chosen);
  // The state opens before the model loads, so that an unusable folder or store
  // fails at once.
  engine::OpenedState opened;
  if (fingerprint.ok()) {
    WEFT_ASSIGN_OR_RETURN(opened,
                          engine::OpenState(chosen, *fingerprint, registry));
  }
  WEFT_ASSIGN_OR_RETURN(engine::LoadedRank rank,
                        engine::LoadRank(chosen, world));
  // LoadRank's errors come first: they say more about a bad model folder.
  WEFT_RETURN_IF_ERROR(fingerprint.status());
  engine::EngineParts parts{
      .options = std::move(rank.options),
      .links = std::move(rank.links),
      .device = std::move(rank.device),
      .decoder = std::move(rank.decoder),
      .disks = MakeDiskMetrics(chosen, spill, registry),
      .spill = std::make_unique<SpillFolder>(std::move(spill)),
      .memory = rank.memory};

  absl::StatusOr<sampling::TokenBytes> token_bytes =
      sampling::TokenBytes::Load(options.model_dir);
  if (token_bytes.ok()) {
    parts.token_bytes =
        std::make_unique<sampling::TokenBytes>(*std::move(token_bytes));
  } else {
    Log(LogLevel::kWarning, "byte-string stops are off",
        {{"reason", token_bytes.status().message()}});
  }
  parts.base = BaseOf(options, *parts.decoder, *std::move(fingerprint));
  parts.info =
      MakeInfo(parts.options, *parts.decoder, parts.token_bytes != nullptr);
  Log(LogLevel::kInfo, "model loaded",
      {{"model", parts.base.name},
       {"architecture", parts.info.architecture},
       {"parameters", parts.info.num_parameters},
       {"device", parts.info.device},
       {"dtype", parts.info.dtype},
       {"threads", at::get_num_threads()},
       {"ranks", world.size},
       {"seconds", absl::ToDoubleSeconds(SteadyNow() - start)}});

  WEFT_RETURN_IF_ERROR(engine::TakeState(
      parts.options, StandBy(on_standby, &parts.links), &opened));
  GiveState(std::move(opened), registry, &parts);
  std::unique_ptr<engine::EngineImpl> engine;
  WEFT_RETURN_IF_ERROR(engine::RunGuarded("starting the engine", [&] {
    engine = std::make_unique<engine::EngineImpl>(std::move(parts), registry);
  }));
  WEFT_RETURN_IF_ERROR(engine->Recover());
  return engine;
}

absl::Status RunRemoteWorker(const EngineOptions& options, const World& world,
                             const std::function<void()>& met) {
  WEFT_ASSIGN_OR_RETURN(engine::LoadedRank rank,
                        engine::LoadRank(options, world, met));
  Log(LogLevel::kInfo, "rank ready",
      {{"rank", world.rank}, {"threads", at::get_num_threads()}});
  return engine::RunGuarded("following rank 0", [&] {
    executor::RemoteWorker(*rank.decoder,
                           engine::HeadOptionsOf(rank.options, *rank.decoder),
                           &rank.links)
        .Run();
  });
}

}  // namespace weft::engine
