#include "src/store/open_store.h"

#include <algorithm>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"
#include "src/store/environment.h"
#include "src/store/folder_store.h"
#include "src/store/s3_store.h"

namespace weft::store {
namespace {

constexpr uint64_t kMaxProbeBytes = 1 << 10;

absl::Status BadUrl(const std::string& url, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("the store \"", ShownUrl(url), "\" ", why,
                   " (give s3://BUCKET/PREFIX or file:///FOLDER)"));
}

bool IsBucket(absl::string_view name) {
  return name.size() >= 3 && name.size() <= 63 &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_islower(c) || absl::ascii_isdigit(c) ||
                  c == '-' || c == '.';
         });
}

std::string RandomHex() {
  std::random_device random;
  std::string hex;
  for (int i = 0; i < 4; ++i) {
    absl::StrAppend(&hex, absl::Hex(random(), absl::kZeroPad8));
  }
  return hex;
}

absl::Status Broken(const ObjectStore& store, const char* what) {
  return absl::FailedPreconditionError(absl::StrCat(
      store.NameOf(""), ": the store does not keep conditional writes: ", what,
      ". Two processes could own the same state. Use a store that keeps "
      "If-None-Match and If-Match"));
}

// Returns the ETag of the object if it has these bytes. A write whose answer
// was lost is repeated, and then refused though it succeeded.
absl::StatusOr<std::string> Look(ObjectStore* store, const std::string& key,
                                 const std::string& bytes,
                                 const absl::StatusOr<std::string>& written) {
  if (written.ok() || (!absl::IsAlreadyExists(written.status()) &&
                       !absl::IsAborted(written.status()))) {
    return written;
  }
  const absl::StatusOr<Object> object = store->Get(key, kMaxProbeBytes);
  if (!object.ok()) return object.status();
  if (object->bytes != bytes) return written;
  return object->etag;
}

absl::Status Probe(ObjectStore* store, const std::string& key,
                   const std::string& missing) {
  const std::string first = RandomHex(), second = RandomHex();
  const absl::StatusOr<std::string> created =
      Look(store, key, first, store->Create(key, {first}));
  if (!created.ok()) return created.status();
  const absl::Status again = store->Create(key, {RandomHex()}).status();
  if (again.ok()) {
    return Broken(*store, "it replaced an object in spite of If-None-Match");
  }
  if (!absl::IsAlreadyExists(again)) return again;
  const absl::StatusOr<std::string> swapped =
      Look(store, key, second, store->Swap(key, second, *created));
  if (absl::IsAborted(swapped.status())) {
    return Broken(*store, "it refuses If-Match with the object's ETag");
  }
  if (!swapped.ok()) return swapped.status();
  const absl::Status stale = store->Swap(key, RandomHex(), *created).status();
  if (stale.ok()) {
    return Broken(*store, "it replaced an object in spite of If-Match");
  }
  if (!absl::IsAborted(stale)) return stale;
  const absl::Status none = store->Swap(missing, first, *created).status();
  if (none.ok()) {
    return Broken(*store, "it created an object in spite of If-Match");
  }
  return absl::IsAborted(none) ? absl::OkStatus() : none;
}

}  // namespace

std::string ShownUrl(const std::string& url) {
  const size_t at = url.rfind('@');
  const size_t scheme = url.find("://");
  if (at == std::string::npos || scheme == std::string::npos || at < scheme) {
    return url;
  }
  return absl::StrCat(url.substr(0, scheme + 3), "(hidden)", url.substr(at));
}

absl::StatusOr<S3Options> ParseS3Url(const std::string& url) {
  absl::string_view rest = url;
  if (!absl::ConsumePrefix(&rest, "s3://")) {
    return BadUrl(url, "does not begin with s3://");
  }
  absl::ConsumeSuffix(&rest, "/");
  const size_t slash = std::min(rest.find('/'), rest.size());
  S3Options options;
  options.bucket = std::string(rest.substr(0, slash));
  if (!IsBucket(options.bucket)) {
    return BadUrl(url, "has no bucket: 3 to 63 of a-z, 0-9, '-' and '.'");
  }
  if (slash < rest.size()) {
    options.prefix = absl::StrCat(rest.substr(slash + 1), "/");
    if (const absl::Status status =
            CheckKey(options.prefix.substr(0, options.prefix.size() - 1));
        !status.ok()) {
      return BadUrl(url,
                    "has no valid prefix: " + std::string(status.message()));
    }
  }
  options.region = Environment({"AWS_REGION", "AWS_DEFAULT_REGION"});
  options.endpoint = Environment({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  while (absl::EndsWith(options.endpoint, "/")) options.endpoint.pop_back();
  if (!options.endpoint.empty()) {
    if (!absl::StartsWith(options.endpoint, "http://") &&
        !absl::StartsWith(options.endpoint, "https://")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: \"",
          ShownUrl(options.endpoint), "\" is not http:// or https://"));
    }
    if (options.region.empty()) options.region = "us-east-1";
    return options;
  }
  if (options.region.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the store ", ShownUrl(url),
                     " needs AWS_REGION, or AWS_ENDPOINT_URL_S3 for "
                     "another store than Amazon's"));
  }
  options.endpoint =
      absl::StrCat("https://s3.", options.region, ".amazonaws.com",
                   absl::StartsWith(options.region, "cn-") ? ".cn" : "");
  // The certificate has one label for the bucket.
  options.path_style = absl::StrContains(options.bucket, ".");
  return options;
}

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(const std::string& url,
                                                       StoreMetrics* metrics) {
  absl::string_view path = url;
  if (absl::ConsumePrefix(&path, "file://")) {
    while (absl::ConsumeSuffix(&path, "/")) {
    }
    if (!absl::StartsWith(path, "/")) {
      return BadUrl(url, "has no absolute path");
    }
    return FolderStore::Open(std::string(path));
  }
  if (!absl::StartsWith(url, "s3://")) {
    return BadUrl(url, "begins with neither s3:// nor file://");
  }
  WEFT_ASSIGN_OR_RETURN(S3Options options, ParseS3Url(url));
  options.metrics = metrics;
  return std::make_unique<S3Store>(std::move(options));
}

absl::Status CheckConditions(ObjectStore* store) {
  const std::string key = "probe/" + RandomHex();
  const std::string missing = key + "-missing";
  absl::Status status = Probe(store, key, missing);
  // A store that does not answer would hold the caller once more.
  if (!status.ok() && !absl::IsFailedPrecondition(status) &&
      !absl::IsInternal(status)) {
    return status;
  }
  for (const std::string& written : {key, missing}) {
    const absl::Status deleted = store->Delete(written);
    if (status.ok()) status = deleted;
  }
  return status;
}

}  // namespace weft::store
