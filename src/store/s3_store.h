// Keeps objects in a bucket of a store with the S3 API that keeps conditions
// (If-None-Match and If-Match).
#ifndef WEFT_SRC_STORE_S3_STORE_H_
#define WEFT_SRC_STORE_S3_STORE_H_

#include <string>
#include <vector>

#include "src/store/object_store.h"
#include "src/store/s3_client.h"

namespace weft::store {

class S3Store final : public ObjectStore {
 public:
  explicit S3Store(S3Options options) : client_(std::move(options)) {}

  absl::StatusOr<std::string> Create(
      const std::string& key,
      const std::vector<std::string_view>& pieces) override;
  absl::StatusOr<std::string> Swap(const std::string& key,
                                   std::string_view bytes,
                                   const std::string& etag) override;
  absl::StatusOr<Object> Get(const std::string& key,
                             uint64_t max_bytes) override;
  absl::StatusOr<size_t> GetRange(const std::string& key, uint64_t offset,
                                  std::span<char> bytes,
                                  uint64_t* size) override;
  absl::StatusOr<std::vector<ListedObject>> List(const std::string& prefix,
                                                 const std::string& after,
                                                 size_t max_objects) override;
  absl::Status Delete(const std::string& key) override;
  absl::Status DeleteIf(const std::string& key,
                        const std::string& etag) override;
  std::string NameOf(const std::string& key) const override {
    return client_.NameOf(key);
  }
  void Stop() override { client_.Stop(); }

 private:
  struct Range {
    size_t read = 0;
    uint64_t object_size = 0;
  };
  // Does what GetRange does, with one request of `at_once` that run.
  absl::StatusOr<Range> GetPart(const std::string& key, uint64_t offset,
                                std::span<char> bytes, size_t at_once);
  // Returns the bytes of the object. Errors: NOT_FOUND.
  absl::StatusOr<uint64_t> SizeOf(const std::string& key);

  // Sends the object in parts. It appears with the last request, which has the
  // condition.
  absl::StatusOr<std::string> CreateInParts(
      const std::string& key, const std::vector<std::string_view>& pieces);
  absl::StatusOr<std::string> UploadParts(
      const std::string& key, const std::string& upload,
      const std::vector<std::string_view>& pieces);
  absl::StatusOr<std::string> Complete(const std::string& key,
                                       const std::string& upload,
                                       const std::vector<std::string>& etags);

  S3Client client_;
};

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_S3_STORE_H_
