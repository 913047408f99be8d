#include "src/engine/adapter_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace weft::engine {

absl::Status NoSuchAdapter(const std::string& adapter_id) {
  return absl::NotFoundError(
      absl::StrCat("adapter_id: '", adapter_id, "' does not exist"));
}

absl::StatusOr<lora::Adapter*> AdapterTable::Create(
    const std::string& adapter_id, const std::string& tenant,
    const LoraConfig& config) {
  if (entries_.contains(adapter_id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("adapter_id: '", adapter_id, "' exists"));
  }
  if (static_cast<int>(entries_.size()) >= max_adapters_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", max_adapters_,
                     " adapter slots are in use (--max-adapters); delete one"));
  }
  const auto of_tenant = std::ranges::count_if(
      entries_, [&](const auto& e) { return e.second.tenant == tenant; });
  if (of_tenant >= max_per_tenant_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "all ", max_per_tenant_, " adapter slots of tenant '", tenant,
        "' are in use (--max-adapters-per-tenant); delete one"));
  }
  const auto [it, inserted] = entries_.emplace(
      adapter_id,
      Entry{.adapter = lora::Adapter(config, shape_, compute_dtype_, device_),
            .tenant = tenant,
            .snapshots = {},
            .created_at = absl::Now()});
  Renew(adapter_id, it->second);
  return &it->second.adapter;
}

lora::Adapter* AdapterTable::Find(const std::string& adapter_id) {
  const auto it = entries_.find(adapter_id);
  return it == entries_.end() ? nullptr : &it->second.adapter;
}

bool AdapterTable::Erase(const std::string& adapter_id) {
  if (entries_.erase(adapter_id) == 0) return false;
  MutexLock lock(&mu_);
  infos_.erase(adapter_id);
  return true;
}

void AdapterTable::Publish(const std::string& adapter_id, uint64_t last_step) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return;
  it->second.last_step = last_step;
  Renew(adapter_id, it->second);
}

absl::StatusOr<uint64_t> AdapterTable::PublishSnapshot(
    const std::string& adapter_id, const std::string& name) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  Entry& entry = it->second;
  const lora::AdapterVersionPtr& latest = entry.adapter.latest();
  const auto [snapshot, inserted] = entry.snapshots.emplace(name, latest);
  if (!inserted && snapshot->second != latest) {
    return absl::AlreadyExistsError(absl::StrCat(
        "name: snapshot '", name, "' pins version ", snapshot->second->number,
        ", the adapter is at ", latest->number, "; release it first"));
  }
  Renew(adapter_id, entry);
  return latest->number;
}

absl::Status AdapterTable::ReleaseSnapshot(const std::string& adapter_id,
                                           const std::string& name) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  if (it->second.snapshots.erase(name) == 0) {
    return absl::NotFoundError(
        absl::StrCat("name: snapshot '", name, "' does not exist"));
  }
  Renew(adapter_id, it->second);
  return absl::OkStatus();
}

absl::StatusOr<lora::AdapterVersionPtr> AdapterTable::Version(
    const std::string& adapter_id, const std::string& snapshot) {
  const auto it = entries_.find(adapter_id);
  if (it == entries_.end()) return NoSuchAdapter(adapter_id);
  if (snapshot.empty()) return it->second.adapter.latest();
  const auto found = it->second.snapshots.find(snapshot);
  if (found == it->second.snapshots.end()) {
    return absl::NotFoundError(
        absl::StrCat("snapshot: '", snapshot, "' does not exist"));
  }
  return found->second;
}

absl::StatusOr<AdapterInfo> AdapterTable::Info(
    const std::string& adapter_id) const {
  MutexLock lock(&mu_);
  const auto it = infos_.find(adapter_id);
  if (it == infos_.end()) return NoSuchAdapter(adapter_id);
  return it->second;
}

std::vector<AdapterInfo> AdapterTable::Infos() const {
  MutexLock lock(&mu_);
  std::vector<AdapterInfo> infos;
  infos.reserve(infos_.size());
  for (const auto& [id, info] : infos_) infos.push_back(info);
  return infos;
}

uint64_t AdapterTable::resident_bytes() const {
  MutexLock lock(&mu_);
  uint64_t bytes = 0;
  for (const auto& [id, info] : infos_) bytes += info.resident_bytes;
  return bytes;
}

void AdapterTable::Renew(const std::string& adapter_id, const Entry& entry) {
  AdapterInfo info{.adapter_id = adapter_id,
                   .tenant = entry.tenant,
                   .config = entry.adapter.config(),
                   .last_step = entry.last_step,
                   .optim_steps = entry.adapter.optim_steps(),
                   .version = entry.adapter.latest()->number,
                   .num_parameters = static_cast<uint64_t>(
                       entry.adapter.layout().num_parameters()),
                   .resident_bytes = entry.adapter.resident_bytes(),
                   .created_at = entry.created_at};
  for (const auto& [name, version] : entry.snapshots) {
    info.snapshots.push_back(name);
  }
  MutexLock lock(&mu_);
  infos_[adapter_id] = std::move(info);
}

}  // namespace weft::engine
