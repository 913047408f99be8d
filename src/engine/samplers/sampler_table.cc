#include "src/engine/samplers/sampler_table.h"

namespace weft::engine {

void SamplerTable::Add(AdapterKey key, const std::string& tenant, int64_t bytes,
                       Sampler sampler) {
  current_[sampler.name] = key;
  entries_[key] = {.sampler = std::move(sampler),
                   .place = order_.Add(tenant, key, bytes)};
}

std::optional<AdapterKey> SamplerTable::Find(const SamplerName& name) const {
  const auto found = current_.find(name);
  if (found == current_.end()) return std::nullopt;
  return found->second;
}

void SamplerTable::Begin(AdapterKey key) {
  Entry& entry = entries_.at(key);
  ++entry.uses;
  order_.Renew(entry.place);
}

bool SamplerTable::End(AdapterKey key) {
  Entry& entry = entries_.at(key);
  if (--entry.uses > 0 || !entry.retired) return false;
  Erase(key);
  return true;
}

bool SamplerTable::Retire(AdapterKey key) {
  Entry& entry = entries_.at(key);
  if (entry.retired) return false;
  entry.retired = true;
  current_.erase(entry.sampler.name);
  if (entry.uses > 0) return false;
  Erase(key);
  return true;
}

std::optional<AdapterKey> SamplerTable::LongestUnused(
    const Account& account) const {
  for (const auto& [key, bytes] : account.entries) {
    if (entries_.at(key).uses == 0) return key;
  }
  return std::nullopt;
}

std::optional<AdapterKey> SamplerTable::Evict(const std::string& tenant) {
  const auto& accounts = order_.accounts();
  std::optional<AdapterKey> victim;
  int64_t most = 0;
  if (const auto own = accounts.find(tenant); own != accounts.end()) {
    victim = LongestUnused(own->second);
    most = own->second.bytes;
  }
  for (const auto& [owner, account] : accounts) {
    if (account.bytes <= most) continue;
    const std::optional<AdapterKey> unused = LongestUnused(account);
    if (!unused) continue;
    victim = unused;
    most = account.bytes;
  }
  if (!victim) return std::nullopt;
  current_.erase(entries_.at(*victim).sampler.name);
  Erase(*victim);
  return victim;
}

void SamplerTable::Erase(AdapterKey key) {
  order_.Remove(entries_.at(key).place);
  entries_.erase(key);
}

}  // namespace weft::engine
