// Keeps objects, which are bytes with a name, where they outlive machines. Many
// processes may use a store at once: an object is whole or absent, and a
// condition holds at the moment at which the object is written, so of all
// writers of one name exactly one succeeds. A write or a deletion that has
// ended is seen by every later read and listing.
//
// Keys are paths of printable ASCII without `\` below the store's prefix, with
// `/` between parts and at most 512 bytes.
//
// Errors of all functions: UNAVAILABLE (the store does not answer or asks for
// less; all attempts failed, and what they asked for may happen, even later),
// DEADLINE_EXCEEDED (as UNAVAILABLE, in the time of one request), CANCELLED (as
// UNAVAILABLE, because of Stop), PERMISSION_DENIED (the store refuses the
// credentials, or there are none), FAILED_PRECONDITION (there is no such
// bucket, or the store's certificate is not trusted), INVALID_ARGUMENT (not a
// key), INTERNAL (the store answers with something else than its API; the
// message has what it said), and those that a function names.
// Threads: any. All functions block, and repeat what failed for a while.
#ifndef WEFT_SRC_STORE_OBJECT_STORE_H_
#define WEFT_SRC_STORE_OBJECT_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft::store {

// An object with more bytes is sent in parts. It is whole or absent, too, but
// at some stores (such as SeaweedFS 4.48) several of its writers may succeed if
// they end at the same moment. So it must not be what only one may create.
inline constexpr uint64_t kMaxAtomicBytes = 64 << 20;

struct Object {
  std::string bytes;
  std::string etag;
};

struct ListedObject {
  std::string key;
  std::string etag;
  uint64_t size = 0;  // Bytes.
};

inline constexpr size_t kAllObjects = SIZE_MAX;

class ObjectStore {
 public:
  virtual ~ObjectStore() = default;

  // Writes a new object from the pieces, one after another, and returns its
  // ETag. Errors: ALREADY_EXISTS if the object exists. That may be this call's
  // own, if the answer to an attempt was lost: only its bytes tell.
  virtual absl::StatusOr<std::string> Create(
      const std::string& key, const std::vector<std::string_view>& pieces) = 0;

  // Replaces an object that has the ETag, and returns the new one. Objects with
  // equal bytes may have equal ETags, so versions must differ. Errors: ABORTED
  // if the object is missing or has another ETag. That may be this call's own,
  // as for Create.
  virtual absl::StatusOr<std::string> Swap(const std::string& key,
                                           std::string_view bytes,
                                           const std::string& etag) = 0;

  // Errors: NOT_FOUND; RESOURCE_EXHAUSTED if the object has more bytes than
  // `max_bytes`.
  virtual absl::StatusOr<Object> Get(const std::string& key,
                                     uint64_t max_bytes) = 0;

  // Reads bytes from `offset` on into `bytes`, and returns how many: fewer only
  // at the object's end. Sets `*size` to the bytes of the whole object. Errors:
  // NOT_FOUND.
  virtual absl::StatusOr<size_t> GetRange(const std::string& key,
                                          uint64_t offset,
                                          std::span<char> bytes,
                                          uint64_t* size) = 0;

  // Returns the objects whose keys begin with `prefix` and come after `after`
  // (empty: from the first), in the order of their keys' bytes, at most
  // `max_objects` of them. Some stores (such as SeaweedFS 4.48) have another
  // order for keys of different folders. So if not all of the keys are in one
  // folder, `after` must be empty, and `max_objects` enough for all.
  virtual absl::StatusOr<std::vector<ListedObject>> List(
      const std::string& prefix, const std::string& after,
      size_t max_objects) = 0;

  // Removes an object. No error if it is missing.
  virtual absl::Status Delete(const std::string& key) = 0;
  // Removes an object that has the ETag. No error if it is missing. Errors:
  // ABORTED if it has another ETag. Some stores (such as MinIO) do not know
  // this condition, and remove the object.
  virtual absl::Status DeleteIf(const std::string& key,
                                const std::string& etag) = 0;

  // Returns the place of a key for messages, such as s3://bucket/prefix/key.
  virtual std::string NameOf(const std::string& key) const = 0;

  // Ends all calls that run, and all later ones, with CANCELLED. Does not
  // block. For a process that must end soon.
  virtual void Stop() = 0;
};

// Returns whether an error means that the store does not answer, so that the
// same call may succeed later.
bool IsAway(const absl::Status& status);

// Returns the ABORTED of a store for the object `name`.
absl::Status OtherEtag(const std::string& name, const std::string& etag);

// Does what Create does with a name that no other call uses. So an object that
// exists is this call's own: an answer was lost, which is no error.
absl::Status CreateOnce(ObjectStore& store, const std::string& key,
                        const std::vector<std::string_view>& pieces);

// Returns INVALID_ARGUMENT if `key` is not a key: it is empty or too long, has
// other bytes, or has a part that is empty, "." or "..".
absl::Status CheckKey(std::string_view key);

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_OBJECT_STORE_H_
