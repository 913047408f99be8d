// An object store in memory, for tests: its answers can get lost.
#ifndef WEFT_TESTS_SUPPORT_MEMORY_STORE_H_
#define WEFT_TESTS_SUPPORT_MEMORY_STORE_H_

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/threads/mutex.h"
#include "src/store/object_store.h"

namespace weft::store {

// The objects, which outlive the stores of several processes.
struct MemoryObjects {
  // What becomes of a request that writes. A lost one is executed, and its
  // answer is UNAVAILABLE; a repeated one is executed, and so is the attempt
  // after it, whose answer is returned.
  enum class Fate { kGood, kRefused, kLost, kRepeated };

  Mutex mu;
  // Of stores in several threads, `mu` guards these.
  std::map<std::string, Object> objects;
  uint64_t last_etag = 0;
  // Is asked before each write, with the operation and the key.
  std::function<Fate(const std::string&, const std::string&)> fate;
  absl::Status read_error;  // What Get returns, if it is an error.
  absl::Status list_error;  // What List returns, if it is an error.
  // Runs before each request, without the lock.
  std::function<void(const std::string&, const std::string&)> before;
};

class MemoryStore : public ObjectStore {
 public:
  explicit MemoryStore(MemoryObjects* shared) : shared_(*shared) {}

  absl::StatusOr<std::string> Create(
      const std::string& key,
      const std::vector<std::string_view>& pieces) override {
    std::string bytes;
    for (const std::string_view piece : pieces) bytes += piece;
    return Write("create", key, [&]() -> absl::StatusOr<std::string> {
      if (shared_.objects.contains(key)) {
        return absl::AlreadyExistsError(key);
      }
      return Put(key, bytes);
    });
  }

  absl::StatusOr<std::string> Swap(const std::string& key,
                                   std::string_view bytes,
                                   const std::string& etag) override {
    return Write("swap", key, [&]() -> absl::StatusOr<std::string> {
      const auto object = shared_.objects.find(key);
      if (object == shared_.objects.end() || object->second.etag != etag) {
        return absl::AbortedError(key);
      }
      return Put(key, std::string(bytes));
    });
  }

  absl::StatusOr<Object> Get(const std::string& key,
                             uint64_t /*max_bytes*/) override {
    Before("get", key);
    MutexLock lock(&shared_.mu);
    if (!shared_.read_error.ok()) return shared_.read_error;
    const auto object = shared_.objects.find(key);
    if (object == shared_.objects.end()) return absl::NotFoundError(key);
    return object->second;
  }

  absl::StatusOr<size_t> GetRange(const std::string& key, uint64_t offset,
                                  std::span<char> bytes,
                                  uint64_t* size) override {
    absl::StatusOr<Object> object = Get(key, 0);
    if (!object.ok()) return object.status();
    *size = object->bytes.size();
    const std::string part =
        object->bytes.substr(std::min<uint64_t>(offset, *size), bytes.size());
    std::ranges::copy(part, bytes.begin());
    return part.size();
  }

  absl::StatusOr<std::vector<ListedObject>> List(const std::string& prefix,
                                                 const std::string& after,
                                                 size_t max_objects) override {
    Before("list", prefix);
    std::vector<ListedObject> listed;
    MutexLock lock(&shared_.mu);
    if (!shared_.list_error.ok()) return shared_.list_error;
    for (const auto& [key, object] : shared_.objects) {
      if (key <= after || !absl::StartsWith(key, prefix)) continue;
      if (listed.size() == max_objects) break;
      listed.push_back(
          {.key = key, .etag = object.etag, .size = object.bytes.size()});
    }
    return listed;
  }

  absl::Status Delete(const std::string& key) override {
    return Write("delete", key,
                 [&]() -> absl::StatusOr<std::string> {
                   shared_.objects.erase(key);
                   return std::string();
                 })
        .status();
  }

  absl::Status DeleteIf(const std::string& key,
                        const std::string& etag) override {
    return Write("delete", key,
                 [&]() -> absl::StatusOr<std::string> {
                   const auto object = shared_.objects.find(key);
                   if (object == shared_.objects.end()) return std::string();
                   if (object->second.etag != etag) {
                     return absl::AbortedError(key);
                   }
                   shared_.objects.erase(object);
                   return std::string();
                 })
        .status();
  }

  std::string NameOf(const std::string& key) const override {
    return "memory://" + key;
  }

  void Stop() override {}

 private:
  void Before(const std::string& operation, const std::string& key) {
    if (shared_.before) shared_.before(operation, key);
  }

  template <typename Execute>
  absl::StatusOr<std::string> Write(const std::string& operation,
                                    const std::string& key,
                                    const Execute& execute) {
    using Fate = MemoryObjects::Fate;
    Before(operation, key);
    const Fate fate = shared_.fate ? shared_.fate(operation, key) : Fate::kGood;
    MutexLock lock(&shared_.mu);
    if (fate == Fate::kRefused) return absl::UnavailableError("refused");
    absl::StatusOr<std::string> result = execute();
    if (fate == Fate::kLost) return absl::UnavailableError("lost");
    if (fate == Fate::kRepeated) result = execute();
    return result;
  }

  std::string Put(const std::string& key, std::string bytes) {
    std::string etag = absl::StrCat("etag-", ++shared_.last_etag);
    shared_.objects[key] = {.bytes = std::move(bytes), .etag = etag};
    return etag;
  }

  MemoryObjects& shared_;
};

}  // namespace weft::store

#endif  // WEFT_TESTS_SUPPORT_MEMORY_STORE_H_
