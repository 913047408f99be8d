// A table of entries that belong to owners.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_TABLE_H_
#define WEFT_SERVER_TINKER_TABLE_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {

// Entry has the members `owner` and `session`; the latter only if OfSession is
// called. An entry stays at its address until it is taken out.
template <typename Entry>
class Table {
 public:
  // `what` is the word for an entry in messages.
  explicit Table(const char* what) : what_(what) {}

  // Returns the owner's entry. Errors: NOT_FOUND, also if another owner has it;
  // the error of `id`.
  absl::StatusOr<Entry*> FindOf(const std::string& owner,
                                const absl::StatusOr<std::string>& id) {
    WEFT_RETURN_IF_ERROR(id.status());
    Entry* const entry = Find(*id);
    if (entry != nullptr && entry->owner == owner) return entry;
    return absl::NotFoundError(absl::StrCat("no ", what_, " ", Quoted(*id)));
  }
  // Return the entry; nullptr if there is none.
  Entry* Find(const std::string& id) {
    const auto found = entries_.find(id);
    return found == entries_.end() ? nullptr : &found->second;
  }
  const Entry* Find(const std::string& id) const {
    const auto found = entries_.find(id);
    return found == entries_.end() ? nullptr : &found->second;
  }
  bool Has(const std::string& id) const { return entries_.contains(id); }

  // Adds the entry, unless the id has one. Returns the id's entry, and whether
  // it was added.
  std::pair<Entry*, bool> Add(const std::string& id, Entry entry) {
    const auto [found, added] = entries_.try_emplace(id, std::move(entry));
    return {&found->second, added};
  }
  // Takes the id's entry out, if it has one.
  std::optional<Entry> Take(const std::string& id) {
    auto node = entries_.extract(id);
    if (node.empty()) return std::nullopt;
    return std::move(node.mapped());
  }

  // Return the ids of the entries for which `fits` is true, or of a session.
  template <typename Fits>
  std::vector<std::string> Where(Fits fits) const {
    std::vector<std::string> ids;
    for (const auto& [id, entry] : entries_) {
      if (fits(entry)) ids.push_back(id);
    }
    return ids;
  }
  std::vector<std::string> OfSession(const std::string& session) const {
    return Where([&](const Entry& entry) { return entry.session == session; });
  }

  // Pairs of id and entry, by id.
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  size_t size() const { return entries_.size(); }

 private:
  const char* const what_;
  std::map<std::string, Entry> entries_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_TABLE_H_
