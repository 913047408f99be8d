#include "src/store/open_store.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/base/files/file_io.h"
#include "src/store/folder_store.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::store {
namespace {

using ::testing::HasSubstr;

class OpenStoreTest : public ::testing::Test {
 protected:
  OpenStoreTest() {
    for (const char* name : {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL",
                             "AWS_REGION", "AWS_DEFAULT_REGION"}) {
      const char* value = std::getenv(name);
      before_[name] = value != nullptr ? value : "";
      unsetenv(name);
    }
  }
  ~OpenStoreTest() override {
    for (const auto& [name, value] : before_) {
      value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
    }
  }
  static absl::Status Refused(const std::string& url) {
    return OpenStore(url, nullptr).status();
  }

  std::map<const char*, std::string> before_;
};

TEST_F(OpenStoreTest, AnUnclearUrlIsRefused) {
  setenv("AWS_REGION", "eu-west-1", 1);
  for (const char* url :
       {"", "s3", "s3:/bucket", "http://host", "s3://", "s3:///prefix",
        "s3://ab", "s3://Bucket", "s3://bucket//prefix", "s3://bucket/../x",
        "s3://bucket/a\nb", "file://", "file:///", "file://folder"}) {
    EXPECT_THAT(Refused(url), IsStatus(absl::StatusCode::kInvalidArgument,
                                       "s3://BUCKET/PREFIX or file:///FOLDER"))
        << url;
  }
}

TEST_F(OpenStoreTest, AMessageHidesWhatIsBeforeTheHost) {
  EXPECT_EQ(ShownUrl("s3://bucket/prefix"), "s3://bucket/prefix");
  EXPECT_EQ(ShownUrl("s3://id:secret@b/p"), "s3://(hidden)@b/p");
  EXPECT_THAT(ParseS3Url("s3://id:secret@bucket"),
              IsStatus(absl::StatusCode::kInvalidArgument, "(hidden)@bucket"));
}

TEST_F(OpenStoreTest, TheRegionOrTheEndpointMustBeKnown) {
  EXPECT_THAT(Refused("s3://bucket/a"),
              IsStatus(absl::StatusCode::kInvalidArgument, "AWS_REGION"));
  setenv("AWS_ENDPOINT_URL", "host", 1);
  EXPECT_THAT(Refused("s3://bucket/a"),
              IsStatus(absl::StatusCode::kInvalidArgument, "\"host\" is not"));
}

TEST_F(OpenStoreTest, TheEnvironmentNamesTheServer) {
  setenv("AWS_DEFAULT_REGION", "eu-west-1", 1);
  auto options = ParseS3Url("s3://bucket/a/b/");
  ASSERT_THAT(options, IsOk());
  EXPECT_EQ(options->bucket, "bucket");
  EXPECT_EQ(options->prefix, "a/b/");
  EXPECT_EQ(options->endpoint, "https://s3.eu-west-1.amazonaws.com");
  EXPECT_FALSE(options->path_style);
  EXPECT_EQ(ParseS3Url("s3://bucket")->prefix, "");
  EXPECT_TRUE(ParseS3Url("s3://with.dot")->path_style);
  setenv("AWS_REGION", "cn-north-1", 1);
  EXPECT_EQ(ParseS3Url("s3://bucket")->endpoint,
            "https://s3.cn-north-1.amazonaws.com.cn");
  setenv("AWS_ENDPOINT_URL", "http://all", 1);
  setenv("AWS_ENDPOINT_URL_S3", "https://own/", 1);
  options = ParseS3Url("s3://bucket");
  EXPECT_EQ(options->endpoint, "https://own");
  EXPECT_EQ(options->region, "cn-north-1");
  EXPECT_TRUE(options->path_style);
  unsetenv("AWS_REGION");
  unsetenv("AWS_DEFAULT_REGION");
  EXPECT_EQ(ParseS3Url("s3://bucket")->region, "us-east-1");
}

// Ignores one of the conditions, as some stores do.
class CarelessStore final : public ObjectStore {
 public:
  enum Fault { kNone, kCreate, kSwap, kSwapMissing, kNeverSwaps };

  CarelessStore(const std::string& folder, Fault fault)
      : fault_(fault), inner_(*FolderStore::Open(folder)) {}

  absl::StatusOr<std::string> Create(
      const std::string& key,
      const std::vector<std::string_view>& pieces) override {
    if (fault_ == kCreate) inner_->Delete(key).IgnoreError();
    return inner_->Create(key, pieces);
  }
  absl::StatusOr<std::string> Swap(const std::string& key,
                                   std::string_view bytes,
                                   const std::string& etag) override {
    if (fault_ == kNeverSwaps) return absl::AbortedError("never");
    const auto object = inner_->Get(key, 1000);
    if (fault_ == kSwapMissing && !object.ok()) {
      return inner_->Create(key, {bytes});
    }
    return inner_->Swap(key, bytes,
                        fault_ == kSwap && object.ok() ? object->etag : etag);
  }
  absl::StatusOr<Object> Get(const std::string& key, uint64_t max) override {
    return inner_->Get(key, max);
  }
  absl::StatusOr<size_t> GetRange(const std::string& key, uint64_t offset,
                                  std::span<char> bytes,
                                  uint64_t* size) override {
    return inner_->GetRange(key, offset, bytes, size);
  }
  absl::StatusOr<std::vector<ListedObject>> List(const std::string& prefix,
                                                 const std::string& after,
                                                 size_t max) override {
    return inner_->List(prefix, after, max);
  }
  absl::Status Delete(const std::string& key) override {
    return inner_->Delete(key);
  }
  absl::Status DeleteIf(const std::string& key,
                        const std::string& etag) override {
    return inner_->DeleteIf(key, etag);
  }
  std::string NameOf(const std::string& key) const override {
    return inner_->NameOf(key);
  }
  void Stop() override { inner_->Stop(); }

 private:
  const Fault fault_;
  const std::unique_ptr<FolderStore> inner_;
};

TEST(CheckConditionsTest, AStoreThatIgnoresAConditionIsRefused) {
  const struct {
    CarelessStore::Fault fault;
    const char* text;
  } cases[] = {
      {CarelessStore::kCreate, "in spite of If-None-Match"},
      {CarelessStore::kSwap, "replaced an object in spite of If-Match"},
      {CarelessStore::kSwapMissing, "created an object in spite of If-Match"},
      {CarelessStore::kNeverSwaps, "refuses If-Match with the object's ETag"}};
  for (const auto& [fault, text] : cases) {
    const TempFolder folder;
    CarelessStore store(folder.path(), fault);
    const absl::Status status = CheckConditions(&store);
    EXPECT_THAT(status, IsStatus(absl::StatusCode::kFailedPrecondition, text));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("does not keep conditional writes"));
    EXPECT_TRUE(store.List("", "", 10)->empty()) << text;
  }
  const TempFolder folder;
  CarelessStore store(folder.path(), CarelessStore::kNone);
  EXPECT_THAT(CheckConditions(&store), IsOk());
}

TEST(FolderStoreTest, AKeyIsNoFolderAndNotTheStoresOwn) {
  const TempFolder folder;
  const auto store = *FolderStore::Open(folder.path() + "/new/folder");
  EXPECT_THAT(store->Create("a/b", {"1"}), IsOk());
  EXPECT_FALSE(store->Create("a", {"1"}).ok());
  EXPECT_FALSE(store->Create("a/b/c", {"1"}).ok());
  EXPECT_THAT(store->Get("a", 1), IsStatus(absl::StatusCode::kNotFound, "a"));
  for (const char* key : {".weft/lock", ".weftx", "a/.weft"}) {
    EXPECT_THAT(store->Create(key, {"1"}),
                IsStatus(absl::StatusCode::kInvalidArgument, ".weft"));
  }
  EXPECT_EQ(store->List("", "", 10)->size(), 1u);
}

TEST(FolderStoreTest, OpenRemovesWhatDeadProcessesLeft) {
  const TempFolder folder;
  ASSERT_THAT(FolderStore::Open(folder.path()), IsOk());
  folder.Write(".weft/tmp-dead", "1");
  const auto store = FolderStore::Open(folder.path());
  ASSERT_THAT(store, IsOk());
  const auto own = OpenDirectory(folder.path() + "/.weft", "own");
  EXPECT_THAT(ReadFileAt(own->get(), "tmp-dead"),
              IsStatus(absl::StatusCode::kNotFound, ""));
}

}  // namespace
}  // namespace weft::store
