// Validation of AdapterService's requests; see request_validation.h.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/wire/adapter_fields.h"
#include "server/wire/field_checks.h"
#include "server/wire/file_assembler.h"
#include "server/wire/request_validation.h"
#include "server/wire/response_conversion.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr uint32_t kDefaultRank = 32;
constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

// Applies FNV-1a and then a finalizer, so that similar ids get unrelated seeds.
uint64_t SeedOf(absl::string_view adapter_id) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : adapter_id) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

absl::StatusOr<TargetModule> ReadTargetModule(int index, int module,
                                              const RequestLimits& limits) {
  const auto known = std::ranges::find_if(
      kAllTargetModules,
      [module](TargetModule other) { return ToProto(other) == module; });
  const std::string field = absl::StrCat("config.target_modules[", index, "]");
  if (known == kAllTargetModules.end()) {
    return BadField(field, "is ", module, ", must be a known TargetModule");
  }
  if (*known == TargetModule::kLmHead || *known == TargetModule::kEmbedTokens ||
      std::ranges::count(limits.projections, *known) > 0) {
    return *known;
  }
  std::string modules;
  for (const TargetModule other : limits.projections) {
    absl::StrAppend(&modules, TargetModuleName(other), ", ");
  }
  return BadField(field, "is ", TargetModuleName(*known),
                  ", which the base model does not have, "
                  "must be one of ",
                  modules, "lm_head, embed_tokens");
}

absl::StatusOr<LoraConfig> ReadLoraConfig(const v1::LoraConfig& in,
                                          const std::string& adapter_id,
                                          const RequestLimits& limits) {
  const uint32_t rank = in.rank() == 0 ? kDefaultRank : in.rank();
  const auto max_rank = static_cast<uint64_t>(limits.max_rank);
  WEFT_RETURN_IF_ERROR(
      CheckCount("config.rank", rank, 1, max_rank, "--max-rank"));
  LoraConfig out;
  out.rank = static_cast<int>(rank);
  if (in.has_alpha()) out.alpha = in.alpha();
  WEFT_RETURN_IF_ERROR(CheckReal("config.alpha", out.alpha,
                                 {.low = 0, .high = 1e6, .low_open = true}));
  WEFT_RETURN_IF_ERROR(CheckCount("config.expert_rank", in.expert_rank(), 0,
                                  max_rank, "--max-rank"));
  out.expert_rank = static_cast<int>(in.expert_rank());
  out.seed = in.has_seed() ? in.seed() : SeedOf(adapter_id);
  out.target_modules = limits.projections;
  if (in.target_modules().empty()) return out;
  out.target_modules.clear();
  for (int i = 0; i < in.target_modules_size(); ++i) {
    WEFT_ASSIGN_OR_RETURN(const TargetModule module,
                          ReadTargetModule(i, in.target_modules(i), limits));
    auto& modules = out.target_modules;
    if (std::find(modules.begin(), modules.end(), module) != modules.end()) {
      return BadField(absl::StrCat("config.target_modules[", i, "]"), "is ",
                      TargetModuleName(module),
                      " again, must be given at most once");
    }
    modules.push_back(module);
  }
  // Sorts the modules, so that equal configurations compare equal.
  std::sort(out.target_modules.begin(), out.target_modules.end());
  return out;
}

}  // namespace

RequestLimits MakeLimits(const EngineInfo& info, const ServerOptions& options) {
  return {.vocab_size = info.vocab_size,
          .context_length = info.context_length,
          .cached_tokens = info.cached_tokens,
          .eos_token_ids = info.eos_token_ids,
          .max_rank = info.max_rank,
          .num_experts = info.num_experts,
          .experts_per_token = info.experts_per_token,
          .expert_layers = info.expert_layers,
          .projections = info.projections,
          .has_byte_decoder = info.has_byte_decoder,
          .keeps_sample_records = info.keeps_sample_records,
          .max_data = options.max_data_per_request,
          .max_tokens = options.max_tokens_per_request,
          .max_samples = options.max_samples};
}

absl::StatusOr<CreateAdapterRequest> Validate(
    const v1::CreateAdapterRequest& request, const RequestLimits& limits) {
  CreateAdapterRequest out;
  WEFT_ASSIGN_OR_RETURN(out.adapter_id, ReadAdapterId(request, limits));
  WEFT_ASSIGN_OR_RETURN(out.tenant, ReadTenant("tenant", request));
  WEFT_ASSIGN_OR_RETURN(
      out.config, ReadLoraConfig(request.config(), out.adapter_id, limits));
  WEFT_ASSIGN_OR_RETURN(out.durability, ReadDurability("durability", request));
  return out;
}

absl::StatusOr<ListAdaptersRequest> Validate(
    const v1::ListAdaptersRequest& request, const RequestLimits& limits) {
  const uint32_t size =
      request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  WEFT_RETURN_IF_ERROR(CheckCount("page_size", size, 1, kMaxPageSize));
  if (!request.page_token().empty()) {
    WEFT_RETURN_IF_ERROR(CheckAdapterId("page_token", request.page_token(),
                                        limits.engine_names));
  }
  return ListAdaptersRequest{.size = size,
                             .after = request.page_token(),
                             .others = request.page_token().empty()};
}

absl::StatusOr<std::string> Validate(const v1::GetAdapterRequest& request,
                                     const RequestLimits& limits) {
  return ReadAdapterId(request, limits);
}

absl::StatusOr<std::string> Validate(const v1::DeleteAdapterRequest& request,
                                     const RequestLimits& limits) {
  return ReadAdapterId(request, limits);
}

absl::StatusOr<MoveAdapterRequest> Validate(
    const v1::MoveAdapterRequest& request, const RequestLimits& limits) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, ReadAdapterId(request, limits));
  // The engine knows how many logs there are.
  WEFT_RETURN_IF_ERROR(
      CheckCount("log", request.log(), 0, std::numeric_limits<int>::max()));
  return MoveAdapterRequest{.adapter_id = id,
                            .log = static_cast<int>(request.log())};
}

absl::StatusOr<PublishSnapshotRequest> Validate(
    const v1::PublishSnapshotRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  return PublishSnapshotRequest{.adapter_id = request.adapter_id(),
                                .name = request.name(),
                                .step = request.step(),
                                .epoch = request.epoch()};
}

absl::StatusOr<ReleaseSnapshotRequest> Validate(
    const v1::ReleaseSnapshotRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckNames(request, limits));
  return ReleaseSnapshotRequest{.adapter_id = request.adapter_id(),
                                .name = request.name()};
}

absl::StatusOr<Loader> ReadLoader(const v1::ExportAdapterRequest& request) {
  switch (static_cast<int>(request.loader())) {
    case v1::LOADER_UNSPECIFIED:
    case v1::LOADER_PEFT:
      return Loader::kPeft;
    case v1::LOADER_VLLM:
      return Loader::kVllm;
    case v1::LOADER_LLAMA_CPP:
      return Loader::kLlamaCpp;
    default:
      return BadField("loader", "is ", static_cast<int>(request.loader()),
                      ", must be a known Loader");
  }
}

absl::StatusOr<ExportAdapterRequest> Validate(
    const v1::ExportAdapterRequest& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  if (!request.snapshot().empty()) {
    WEFT_RETURN_IF_ERROR(CheckName("snapshot", request.snapshot()));
  }
  WEFT_ASSIGN_OR_RETURN(const Loader loader, ReadLoader(request));
  return ExportAdapterRequest{.adapter_id = request.adapter_id(),
                              .snapshot = request.snapshot(),
                              .loader = loader};
}

absl::StatusOr<ImportAdapterRequest> ReadOptions(
    const v1::ImportOptions& options, bool engine_names) {
  ImportAdapterRequest out{.adapter_id = options.adapter_id()};
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("options.adapter_id", out.adapter_id, engine_names));
  WEFT_ASSIGN_OR_RETURN(out.tenant, ReadTenant("options.tenant", options));
  WEFT_ASSIGN_OR_RETURN(out.durability,
                        ReadDurability("options.durability", options));
  return out;
}

}  // namespace weft::server
