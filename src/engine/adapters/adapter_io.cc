#include "src/engine/adapters/adapter_io.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/files/durable_folder.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"
#include "src/lora/loader_rules.h"
#include "src/lora/peft_format.h"

namespace weft::engine {
namespace {

using nlohmann::json;

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "trainer_state.json";

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() ||
          std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool SameState(const lora::AdapterState& a, const lora::AdapterState& b) {
  return a.optim_steps == b.optim_steps && a.optimizer == b.optimizer &&
         SameBits(a.weights, b.weights) && SameBits(a.gradient, b.gradient) &&
         SameBits(a.moment1, b.moment1) && SameBits(a.moment2, b.moment2);
}

const std::string* FindFile(const DurableFolder& folder,
                            std::string_view name) {
  const auto it = std::ranges::find(
      folder.files, name, &std::pair<std::string, std::string>::first);
  return it == folder.files.end() ? nullptr : &it->second;
}

// Reads the tensors of a checkpoint. Reads only the weights if `weights_only`
// is true or the checkpoint has kind sampler.
absl::StatusOr<lora::AdapterState> ReadState(const DurableFolder& folder,
                                             const CheckpointInfo& info,
                                             const lora::BaseModel& base,
                                             bool weights_only) {
  const model_config::ModelShape& shape = base.shape;
  WEFT_ASSIGN_OR_RETURN(
      lora::PeftAdapter peft,
      lora::ReadPeft(folder.files, shape, base.model_dir, &info.config));
  // Compares layouts, not configs, because different configs may describe the
  // same matrices. For example, one config may give the experts' rank in
  // `rank`, and the other may give it in `overrides`.
  if (lora::AdapterLayout(shape, peft.config).factors() !=
      lora::AdapterLayout(shape, info.config).factors()) {
    return absl::DataLossError(
        absl::StrCat("checkpoint '", info.name,
                     "': adapter_config.json and manifest differ"));
  }
  lora::AdapterState state;
  state.weights = std::move(peft.weights);
  if (weights_only || info.kind == CheckpointKind::kSampler) return state;
  const std::string* optimizer = FindFile(folder, kOptimizerFile);
  if (optimizer == nullptr) {
    return absl::DataLossError(
        absl::StrCat("checkpoint '", info.name, "' has no ", kOptimizerFile));
  }
  const std::pair<const char*, std::vector<float>*> buffers[] = {
      {"gradient", &state.gradient},
      {"exp_avg", &state.moment1},
      {"exp_avg_sq", &state.moment2}};
  for (const auto& [buffer, values] : buffers) {
    WEFT_ASSIGN_OR_RETURN(
        *values, lora::ReadBuffer(*optimizer, buffer, info.config, shape));
  }
  state.optim_steps = info.optim_steps;
  state.optimizer = info.optimizer;
  state.accumulated_tokens = info.accumulated_tokens;
  return state;
}

checkpoint::CheckpointName SourceOf(const LoadCheckpointRequest& request) {
  return {.adapter_id = request.source_adapter_id, .name = request.name};
}

// Turns DATA_LOSS into INVALID_ARGUMENT, because a client sent the damaged
// files. Returns any other status as it is.
absl::Status AsArgument(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  return absl::InvalidArgumentError(absl::StrCat("chunk: ", status.message()));
}

// Refuses files that a checkpoint of this kind does not have.
absl::Status CheckFileNames(const DurableFolder& folder, CheckpointKind kind) {
  std::set<std::string> known = {"adapter_config.json",
                                 "adapter_model.safetensors", kStateFile};
  if (kind == CheckpointKind::kTrain) known.insert(kOptimizerFile);
  for (const auto& [name, contents] : folder.files) {
    if (known.contains(name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("chunk.name: a checkpoint of kind ",
                     CheckpointKindName(kind), " has no file ", name));
  }
  return absl::OkStatus();
}

// Returns the files that PEFT loads and, for kind train, the optimizer's file.
PeftFiles TensorFiles(const lora::AdapterState& state,
                      const CheckpointInfo& info, const lora::BaseModel& base) {
  PeftFiles files =
      lora::WritePeft(info.config, base.shape, state.weights, base.name);
  if (info.kind == CheckpointKind::kTrain) {
    files.emplace_back(kOptimizerFile,
                       lora::WriteBuffers(info.config, base.shape,
                                          {{"gradient", state.gradient},
                                           {"exp_avg", state.moment1},
                                           {"exp_avg_sq", state.moment2}}));
  }
  return files;
}

// The checkpoints that one call of DeleteExpired looks at. Others need the I/O
// thread, too, and a store may take 20 ms for each 16 of them.
constexpr size_t kExpirySlice = 128;

absl::Status Expired(const std::string& name) {
  return absl::NotFoundError(absl::StrCat("\"", name, "\" has expired"));
}

bool HasExpired(const json& fields) {
  const absl::StatusOr<CheckpointInfo> info =
      lora::ReadCheckpointFields(fields);
  return info.ok() && info->expires_at <= absl::Now();
}

absl::Time ExpiryOf(absl::Time from, uint64_t ttl_seconds) {
  if (ttl_seconds == 0) return absl::InfiniteFuture();
  return from + absl::Seconds(static_cast<int64_t>(ttl_seconds));
}

// Sets when a new checkpoint expires. After the clock was set back, its
// creation is in the future, because it comes after the adapter's newest.
void SetExpiry(uint64_t ttl_seconds, CheckpointInfo* info) {
  info->ttl_from = std::min(info->created_at, absl::Now());
  info->expires_at = ExpiryOf(info->ttl_from, ttl_seconds);
}

}  // namespace

absl::StatusOr<CheckpointInfo> AdapterIo::Save(
    const SaveCheckpointRequest& request, const AdapterCopy& adapter) {
  CheckpointInfo info{
      .adapter_id = request.adapter_id,
      .name = request.name,
      .last_step = adapter.last_step,
      .optim_steps = adapter.state.optim_steps,
      .optimizer = adapter.state.optimizer,
      .accumulated_tokens = request.kind == CheckpointKind::kTrain
                                ? adapter.state.accumulated_tokens
                                : 0,
      .config = adapter.config,
      .kind = request.kind,
      .metadata = request.metadata,
      .tenant = adapter.tenant,
      .base_model = base_.name,
      .base_fingerprint = base_.fingerprint};
  WEFT_ASSIGN_OR_RETURN(info.created_at, NextCreation(request.adapter_id));
  SetExpiry(request.ttl_seconds, &info);
  WEFT_RETURN_IF_ERROR(WriteOnce(adapter.state, request.overwrite, &info));
  if (request.keep_newest > 0) KeepNewest(info, request.keep_newest);
  return info;
}

absl::Status AdapterIo::Write(const lora::AdapterState& state, bool overwrite,
                              CheckpointInfo* info) {
  DurableFolder folder;
  folder.files = TensorFiles(state, *info, base_);
  info->size_bytes = 0;
  for (const auto& [name, contents] : folder.files) {
    info->size_bytes += contents.size();
  }
  folder.fields = lora::WriteCheckpointFields(*info, base_.shape);
  folder.files.emplace_back(kStateFile, folder.fields.dump(2));
  const checkpoint::CheckpointName name = {.adapter_id = info->adapter_id,
                                           .name = info->name};
  if (!overwrite) {
    const absl::StatusOr<json> there = checkpoints_->ReadFields(name);
    if (checkpoint::IsUnreachable(there.status())) return there.status();
    overwrite = there.ok() && HasExpired(*there);
  }
  ++changes_;
  WEFT_RETURN_IF_ERROR(
      checkpoints_->Write(name, folder, info->size_bytes, overwrite));
  next_expiry_ = std::min(next_expiry_, info->expires_at);
  stored_[info->adapter_id][info->name] = {.version = "", .info = *info};
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FileSource>> AdapterIo::Download(
    const std::string& adapter_id, const std::string& name) const {
  absl::StatusOr<OpenedFolder> folder =
      checkpoints_->Open({.adapter_id = adapter_id, .name = name});
  if (folder.ok() && HasExpired(folder->fields)) folder = Expired(name);
  if (!folder.ok()) return NameOthers(folder.status(), adapter_id);
  std::erase_if(folder->files,
                [](const auto& file) { return file.name() == kStateFile; });
  folder->files.emplace_back(kStateFile, folder->fields.dump(2));
  return std::move(folder->files);
}

absl::StatusOr<CheckpointInfo> AdapterIo::Upload(
    const UploadCheckpointRequest& request) {
  DurableFolder folder{.files = request.files};
  const std::string* const text = FindFile(folder, kStateFile);
  if (text == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk: no file is named ", kStateFile));
  }
  WEFT_ASSIGN_OR_RETURN(folder.fields,
                        lora::ParseCheckpointFields(*text, kStateFile));
  WEFT_RETURN_IF_ERROR(AsArgument(lora::CheckBaseModel(folder.fields, base_)));
  absl::StatusOr<CheckpointInfo> info =
      lora::ReadCheckpointFields(folder.fields);
  if (!info.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk: ", kStateFile,
                     " lacks a field of a checkpoint, or has a bad value"));
  }
  WEFT_RETURN_IF_ERROR(CheckFileNames(folder, info->kind));
  absl::StatusOr<lora::AdapterState> state =
      ReadState(folder, *info, base_, /*weights_only=*/false);
  WEFT_RETURN_IF_ERROR(AsArgument(state.status()));
  return WriteAs(request, *std::move(info), *std::move(state));
}

absl::StatusOr<CheckpointInfo> AdapterIo::Copy(
    const UploadCheckpointRequest& request) {
  LoadCheckpointRequest load{.source_adapter_id = request.source_adapter_id,
                             .name = request.name,
                             .weights_only = true};
  WEFT_ASSIGN_OR_RETURN(CheckpointInfo info, Describe(load));
  load.weights_only = info.kind == CheckpointKind::kSampler;
  WEFT_ASSIGN_OR_RETURN(LoadedCheckpoint source, Load(load));
  return WriteAs(request, std::move(info), std::move(source.state));
}

absl::StatusOr<CheckpointInfo> AdapterIo::WriteAs(
    const UploadCheckpointRequest& request, CheckpointInfo info,
    lora::AdapterState state) {
  info.adapter_id = request.adapter_id;
  info.name = request.name;
  info.tenant = request.tenant;
  WEFT_ASSIGN_OR_RETURN(info.created_at, NextCreation(request.adapter_id));
  SetExpiry(request.ttl_seconds, &info);
  info.base_model = base_.name;
  info.base_fingerprint = base_.fingerprint;
  state.optim_steps = info.optim_steps;  // 0 if only weights were read.
  WEFT_RETURN_IF_ERROR(request.source_adapter_id.empty()
                           ? Write(state, request.overwrite, &info)
                           : WriteOnce(state, request.overwrite, &info));
  return info;
}

absl::Status AdapterIo::WriteOnce(const lora::AdapterState& state,
                                  bool overwrite, CheckpointInfo* info) {
  const absl::Status written = Write(state, overwrite, info);
  const bool is_full =
      absl::IsResourceExhausted(written) && !checkpoint::IsUnreachable(written);
  if (!absl::IsAlreadyExists(written) && !is_full) return written;
  std::optional<CheckpointInfo> saved = SavedBefore(state, *info);
  if (!saved) return written;
  *info = *std::move(saved);
  return absl::OkStatus();
}

std::optional<CheckpointInfo> AdapterIo::SavedBefore(
    const lora::AdapterState& state, const CheckpointInfo& info) const {
  const absl::StatusOr<DurableFolder> folder =
      checkpoints_->Read({.adapter_id = info.adapter_id, .name = info.name});
  if (!folder.ok()) return std::nullopt;
  absl::StatusOr<CheckpointInfo> saved =
      lora::ReadCheckpointFields(folder->fields);
  if (!saved.ok() || saved->expires_at <= absl::Now() ||
      !lora::CheckBaseModel(folder->fields, base_).ok() ||
      saved->kind != info.kind || saved->metadata != info.metadata ||
      saved->expires_at - saved->ttl_from != info.expires_at - info.ttl_from ||
      saved->last_step != info.last_step ||
      saved->optim_steps != info.optim_steps || saved->config != info.config) {
    return std::nullopt;
  }
  const absl::StatusOr<lora::AdapterState> there =
      ReadState(*folder, *saved, base_, /*weights_only=*/false);
  const bool same = there.ok() && (info.kind == CheckpointKind::kSampler
                                       ? SameBits(there->weights, state.weights)
                                       : SameState(*there, state));
  if (!same) return std::nullopt;
  return *std::move(saved);
}

absl::StatusOr<CheckpointInfo> AdapterIo::Check(
    const LoadCheckpointRequest& request, const json& fields) const {
  WEFT_RETURN_IF_ERROR(lora::CheckBaseModel(fields, base_));
  WEFT_ASSIGN_OR_RETURN(CheckpointInfo info,
                        lora::ReadCheckpointFields(fields));
  if (info.expires_at <= absl::Now()) {
    return NameOthers(Expired(request.name), request.source_adapter_id);
  }
  if (info.kind == CheckpointKind::kSampler && !request.weights_only) {
    return absl::FailedPreconditionError(absl::StrCat(
        "name: checkpoint '", request.name,
        "' has kind sampler, which has no optimizer state: load it with "
        "weights_only"));
  }
  return info;
}

absl::StatusOr<LoadedCheckpoint> AdapterIo::Load(
    const LoadCheckpointRequest& request) const {
  const absl::StatusOr<DurableFolder> folder =
      checkpoints_->Read(SourceOf(request));
  if (!folder.ok()) {
    return NameOthers(folder.status(), request.source_adapter_id);
  }
  LoadedCheckpoint loaded;
  WEFT_ASSIGN_OR_RETURN(loaded.info, Check(request, folder->fields));
  absl::StatusOr<lora::AdapterState> state =
      ReadState(*folder, loaded.info, base_, request.weights_only);
  if (absl::IsInvalidArgument(state.status())) {
    // The error is about the files that the server has stored, not about the
    // request.
    return absl::DataLossError(absl::StrCat("checkpoint '", request.name,
                                            "': ", state.status().message()));
  }
  WEFT_RETURN_IF_ERROR(state.status());
  loaded.state = *std::move(state);
  if (request.weights_only) loaded.info.last_step = 0;
  return loaded;
}

absl::StatusOr<CheckpointInfo> AdapterIo::Describe(
    const LoadCheckpointRequest& request) const {
  const absl::StatusOr<json> fields =
      checkpoints_->ReadFields(SourceOf(request));
  if (!fields.ok()) {
    return NameOthers(fields.status(), request.source_adapter_id);
  }
  return Check(request, *fields);
}

absl::StatusOr<lora::PeftAdapter> AdapterIo::Import(
    const PeftFiles& files) const {
  return lora::ReadPeft(files, base_.shape, base_.model_dir);
}

absl::StatusOr<PeftFiles> AdapterIo::Export(const LoraConfig& config,
                                            const std::vector<float>& weights,
                                            Loader loader) const {
  WEFT_RETURN_IF_ERROR(lora::CheckLoader(
      loader, lora::AdapterLayout(base_.shape, config), base_.shape));
  return lora::WritePeft(config, base_.shape, weights, base_.name, loader);
}

void AdapterIo::RemoveStaleFiles() { checkpoints_->RemoveStaleFiles(); }

void AdapterIo::Sweep() { checkpoints_->Sweep(); }

absl::StatusOr<AdapterIo::Listing> AdapterIo::ListStored(
    const std::string& adapter_id) const {
  WEFT_ASSIGN_OR_RETURN(Listing listed,
                        checkpoints_->List(adapter_id, NamesAll(adapter_id)));
  StoredOf kept;
  for (const auto& [name, version] : listed) {
    const Stored* const known = FindStored(name);
    if (known != nullptr) kept[name.adapter_id][name.name] = *known;
  }
  std::erase_if(stored_, [&adapter_id](const auto& known) {
    return NamesAll(adapter_id) ? known.first.starts_with(adapter_id)
                                : known.first == adapter_id;
  });
  stored_.merge(kept);
  return listed;
}

absl::Status AdapterIo::ReadStored(const Listing& listed) const {
  std::vector<checkpoint::CheckpointName> names;  // Of what is not known yet.
  std::vector<std::string> versions;
  for (const auto& [name, version] : listed) {
    const Stored* const known = FindStored(name);
    if (known != nullptr && known->version == version) continue;
    names.push_back(name);
    versions.push_back(version);
  }
  const std::vector<absl::StatusOr<json>> fields =
      checkpoints_->ReadFieldsOf(names);
  for (size_t i = 0; i < names.size(); ++i) {
    const auto& [adapter, name] = names[i];
    absl::StatusOr<CheckpointInfo> info =
        fields[i].ok() ? lora::ReadCheckpointFields(*fields[i])
                       : absl::StatusOr<CheckpointInfo>(fields[i].status());
    if (checkpoint::IsUnreachable(info.status())) return info.status();
    if (!info.ok()) {
      Forget(names[i]);
      Log(LogLevel::kWarning, "damaged checkpoint",
          {{"adapter", adapter},
           {"name", name},
           {"reason", info.status().message()}});
      continue;
    }
    // Takes adapter_id and name from the place, because somebody may have moved
    // the checkpoint.
    info->adapter_id = adapter;
    info->name = name;
    stored_[adapter][name] = {.version = versions[i], .info = *std::move(info)};
  }
  return absl::OkStatus();
}

const AdapterIo::Stored* AdapterIo::FindStored(
    const checkpoint::CheckpointName& name) const {
  const auto own = stored_.find(name.adapter_id);
  if (own == stored_.end()) return nullptr;
  const auto stored = own->second.find(name.name);
  return stored == own->second.end() ? nullptr : &stored->second;
}

void AdapterIo::Forget(const checkpoint::CheckpointName& name) const {
  const auto own = stored_.find(name.adapter_id);
  if (own != stored_.end() && own->second.erase(name.name) > 0 &&
      own->second.empty()) {
    stored_.erase(own);
  }
}

absl::StatusOr<std::vector<CheckpointInfo>> AdapterIo::ListAll(
    const std::string& adapter_id) const {
  WEFT_ASSIGN_OR_RETURN(const Listing listed, ListStored(adapter_id));
  WEFT_RETURN_IF_ERROR(ReadStored(listed));
  std::vector<CheckpointInfo> infos;
  for (const auto& [name, version] : listed) {
    const Stored* const stored = FindStored(name);
    if (stored != nullptr) infos.push_back(stored->info);
  }
  std::ranges::sort(infos, std::greater<>(), &CheckpointInfo::created_at);
  return infos;
}

absl::StatusOr<std::vector<CheckpointInfo>> AdapterIo::List(
    const std::string& adapter_id) const {
  WEFT_ASSIGN_OR_RETURN(std::vector<CheckpointInfo> infos, ListAll(adapter_id));
  std::erase_if(infos, [now = absl::Now()](const CheckpointInfo& info) {
    return info.expires_at <= now;
  });
  return infos;
}

absl::StatusOr<absl::Time> AdapterIo::NextCreation(
    const std::string& adapter_id) const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> infos,
                        ListAll(adapter_id));
  if (infos.empty()) return absl::Now();
  return std::max(absl::Now(),
                  infos.front().created_at + absl::Microseconds(1));
}

void AdapterIo::DeleteExpired() {
  const absl::Time now = absl::Now();
  if (unseen_.empty() && now < next_expiry_) return;
  absl::Status status;
  if (unseen_.empty()) {
    next_expiry_ = absl::InfiniteFuture();
    absl::StatusOr<Listing> listed = ListStored("");
    status = listed.status();
    if (status.ok()) unseen_ = *std::move(listed);
  }
  const size_t rest = unseen_.size() - std::min(unseen_.size(), kExpirySlice);
  const Listing slice(unseen_.begin() + static_cast<ptrdiff_t>(rest),
                      unseen_.end());
  unseen_.resize(rest);
  if (status.ok()) status = ReadStored(slice);
  if (!status.ok()) {
    Log(LogLevel::kWarning, "expired checkpoints stay for a while",
        {{"reason", status.message()}});
    unseen_.clear();
    next_expiry_ = std::min(next_expiry_, now + expiry_retry_);
    return;
  }
  for (const auto& [name, version] : slice) DeleteIfExpired(name, now);
}

void AdapterIo::DeleteIfExpired(const checkpoint::CheckpointName& name,
                                absl::Time now) {
  const Stored* const stored = FindStored(name);
  if (stored == nullptr) return;
  if (stored->info.expires_at > now) {
    next_expiry_ = std::min(next_expiry_, stored->info.expires_at);
    return;
  }
  // The owner of another log may have written it anew.
  const absl::Status deleted = checkpoints_->RemoveIf(name, HasExpired);
  if (deleted.ok() || absl::IsAborted(deleted)) Forget(name);
  if (!deleted.ok()) next_expiry_ = std::min(next_expiry_, now + expiry_retry_);
  Log(deleted.ok() ? LogLevel::kInfo : LogLevel::kWarning,
      deleted.ok() ? "expired checkpoint deleted"
                   : "an expired checkpoint stays",
      {{"adapter", name.adapter_id},
       {"name", name.name},
       {"reason", deleted.message()}});
}

absl::StatusOr<CheckpointInfo> AdapterIo::SetTtl(
    const SetCheckpointTtlRequest& request) {
  const checkpoint::CheckpointName name = {.adapter_id = request.adapter_id,
                                           .name = request.name};
  absl::StatusOr<json> fields = checkpoints_->ReadFields(name);
  if (fields.ok() && HasExpired(*fields)) fields = Expired(request.name);
  if (!fields.ok()) return NameOthers(fields.status(), request.adapter_id);
  WEFT_ASSIGN_OR_RETURN(CheckpointInfo info,
                        lora::ReadCheckpointFields(*fields));
  info.adapter_id = request.adapter_id;
  info.name = request.name;
  info.ttl_from = std::min(info.ttl_from, absl::Now());
  info.expires_at = ExpiryOf(absl::Now(), request.ttl_seconds);
  lora::WriteExpiry(&info, &*fields);
  ++changes_;
  WEFT_RETURN_IF_ERROR(checkpoints_->ReplaceFields(name, *fields));
  next_expiry_ = std::min(next_expiry_, info.expires_at);
  stored_[info.adapter_id][info.name].version.clear();
  return info;
}

absl::Status AdapterIo::Delete(const std::string& adapter_id,
                               const std::string& name) {
  ++changes_;
  WEFT_RETURN_IF_ERROR(
      checkpoints_->Remove({.adapter_id = adapter_id, .name = name}));
  Forget({.adapter_id = adapter_id, .name = name});
  return absl::OkStatus();
}

uint64_t AdapterIo::stored_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [adapter, checkpoints] : stored_) {
    for (const auto& [name, stored] : checkpoints) {
      bytes += stored.info.size_bytes;
    }
  }
  return bytes;
}

void AdapterIo::KeepNewest(const CheckpointInfo& saved, uint64_t count) {
  const absl::StatusOr<std::vector<CheckpointInfo>> all =
      ListAll(saved.adapter_id);
  if (!all.ok()) {
    Log(LogLevel::kWarning, "old checkpoints stay",
        {{"adapter", saved.adapter_id}, {"reason", all.status().message()}});
    return;
  }
  uint64_t kept = 1;  // Counts `saved`.
  for (const CheckpointInfo& other : *all) {
    if (other.kind != saved.kind || other.name == saved.name) continue;
    if (++kept <= count) continue;
    if (const absl::Status deleted = Delete(saved.adapter_id, other.name);
        !deleted.ok()) {
      Log(LogLevel::kWarning, "an old checkpoint stays",
          {{"adapter", saved.adapter_id},
           {"name", other.name},
           {"reason", deleted.message()}});
    }
  }
}

absl::Status AdapterIo::NameOthers(const absl::Status& status,
                                   const std::string& adapter_id) const {
  constexpr size_t kMaxNames = 5;
  if (!absl::IsNotFound(status)) return status;
  const absl::StatusOr<std::vector<CheckpointInfo>> others = List(adapter_id);
  if (!others.ok() || others->empty()) return status;
  std::vector<std::string> names;
  for (const CheckpointInfo& info : *others) names.push_back(info.name);
  std::ranges::sort(names);
  const size_t more = names.size() - std::min(names.size(), kMaxNames);
  names.resize(names.size() - more);
  absl::Status named = absl::NotFoundError(
      absl::StrCat(status.message(), "; there are checkpoints '",
                   absl::StrJoin(names, "', '"), "'",
                   more > 0 ? absl::StrCat(" and ", more, " more") : ""));
  status.ForEachPayload(
      [&named](absl::string_view url, const absl::Cord& data) {
        named.SetPayload(url, data);
      });
  return named;
}

}  // namespace weft::engine
