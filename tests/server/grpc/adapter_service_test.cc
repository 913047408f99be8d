#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "server/call/stalled_calls.h"
#include "src/base/clock.h"
#include "tests/server/server_fixture.h"

namespace weft::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AdapterServiceTest : public ServerTest {
 protected:
  void SetUp() override { StartReadyServer(); }

  grpc::Status Create(const v1::CreateAdapterRequest& request,
                      v1::Adapter* adapter) {
    v1::CreateAdapterResponse response;
    const grpc::Status status = Send(request, &response);
    *adapter = response.adapter();
    return status;
  }

  // Sends `messages` and closes the stream. Returns the status of the import.
  grpc::Status Import(const std::vector<v1::ImportAdapterRequest>& messages,
                      v1::ImportAdapterResponse* response) {
    grpc::ClientContext context;
    const auto stream = adapters_->ImportAdapter(&context, response);
    for (const auto& message : messages) {
      if (!stream->Write(message)) break;
    }
    stream->WritesDone();
    return stream->Finish();
  }

  static v1::ImportAdapterRequest Options(const std::string& id) {
    v1::ImportAdapterRequest message;
    message.mutable_options()->set_adapter_id(id);
    return message;
  }

  static v1::ImportAdapterRequest Chunk(const std::string& name,
                                        const std::string& data) {
    v1::ImportAdapterRequest message;
    message.mutable_chunk()->set_name(name);
    message.mutable_chunk()->set_data(data);
    return message;
  }
};

TEST_F(AdapterServiceTest, CreateFillsInDefaults) {
  const auto request = Make<v1::CreateAdapterRequest>("adapter_id = 'new'");
  v1::Adapter adapter;
  ASSERT_TRUE(Create(request, &adapter).ok());
  EXPECT_EQ(adapter.adapter_id(), "new");
  EXPECT_EQ(adapter.config().rank(), 32u);
  EXPECT_EQ(adapter.config().alpha(), 32);
  EXPECT_EQ(adapter.config().target_modules_size(), 7);
  EXPECT_EQ(adapter.created_at(), 1700000000);
  EXPECT_EQ(adapter.version(), 1u);
}

TEST_F(AdapterServiceTest, CreateRepeatedWithoutSeedIsAnsweredAsTheFirst) {
  auto request = Make<v1::CreateAdapterRequest>("adapter_id = 'new'");
  v1::Adapter first;
  v1::Adapter again;
  ASSERT_TRUE(Create(request, &first).ok());
  ASSERT_TRUE(Create(request, &again).ok());
  EXPECT_EQ(first.config().seed(), again.config().seed());
  EXPECT_NE(first.config().seed(), 0u);
  request.mutable_config()->set_rank(8);
  EXPECT_EQ(Create(request, &first).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(AdapterServiceTest, CreateKeepsTheTenant) {
  auto request = Make<v1::CreateAdapterRequest>("adapter_id = 'new'");
  v1::Adapter adapter;
  ASSERT_TRUE(Create(request, &adapter).ok());
  EXPECT_EQ(adapter.tenant(), "new");  // The adapter is its own tenant.
  request.set_tenant("alice");
  EXPECT_EQ(Create(request, &adapter).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  request.set_adapter_id("second");
  ASSERT_TRUE(Create(request, &adapter).ok());
  EXPECT_EQ(adapter.tenant(), "alice");
}

TEST_F(AdapterServiceTest, ImportKeepsTheTenant) {
  v1::ImportAdapterRequest options = Options("in");
  options.mutable_options()->set_tenant("alice");
  const v1::ImportAdapterRequest chunk = Chunk("adapter_config.json", "{}");
  v1::ImportAdapterResponse response;
  ASSERT_TRUE(Import({options, chunk}, &response).ok());
  EXPECT_EQ(response.adapter().tenant(), "alice");
  ASSERT_TRUE(Import({Options("own"), chunk}, &response).ok());
  EXPECT_EQ(response.adapter().tenant(), "own");
  options.mutable_options()->set_tenant("a/b");
  const grpc::Status refused = Import({options, chunk}, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("options.tenant is \"a/b\""));
}

TEST_F(AdapterServiceTest, TargetModulesComeInTheOrderOfTheForwardPass) {
  const auto request = Make<v1::CreateAdapterRequest>(
      "adapter_id = 'new'; "
      "config.target_modules += TARGET_MODULE_LM_HEAD; "
      "config.target_modules += TARGET_MODULE_Q_PROJ; "
      "config.target_modules += TARGET_MODULE_EMBED_TOKENS");
  v1::Adapter adapter;
  ASSERT_TRUE(Create(request, &adapter).ok());
  EXPECT_THAT(adapter.config().target_modules(),
              ElementsAre(v1::TARGET_MODULE_Q_PROJ, v1::TARGET_MODULE_LM_HEAD,
                          v1::TARGET_MODULE_EMBED_TOKENS));
}

TEST_F(AdapterServiceTest, GetAndDelete) {
  const auto get = Make<v1::GetAdapterRequest>("adapter_id = 'a'");
  const auto got = Answer<v1::GetAdapterResponse>(get);
  EXPECT_EQ(got.adapter().adapter_id(), "a");
  const auto erase = Make<v1::DeleteAdapterRequest>("adapter_id = 'a'");
  ASSERT_TRUE(Send(erase).ok());
  EXPECT_EQ(Send(get).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Send(erase).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdapterServiceTest, MoveNamesAnAdapterAndALog) {
  const auto move = Make<v1::MoveAdapterRequest>("adapter_id = 'a'; log = 1");
  EXPECT_TRUE(Send(move).ok());
  const auto absent =
      Make<v1::MoveAdapterRequest>("adapter_id = 'none'; log = 1");
  EXPECT_EQ(Send(absent).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdapterServiceTest, ListPagesInOrder) {
  v1::CreateAdapterRequest create;
  v1::Adapter adapter;
  for (const char* id : {"c", "b"}) {
    create.set_adapter_id(id);
    ASSERT_TRUE(Create(create, &adapter).ok());
  }
  auto request = Make<v1::ListAdaptersRequest>("page_size = 2");
  auto page = Answer<v1::ListAdaptersResponse>(request);
  ASSERT_EQ(page.adapters_size(), 2);
  EXPECT_EQ(page.adapters(0).adapter_id(), "a");
  EXPECT_EQ(page.adapters(1).adapter_id(), "b");
  EXPECT_EQ(page.next_page_token(), "b");
  request.set_page_token(page.next_page_token());
  ASSERT_TRUE(Send(request, &page).ok());
  ASSERT_EQ(page.adapters_size(), 1);
  EXPECT_EQ(page.adapters(0).adapter_id(), "c");
  EXPECT_EQ(page.next_page_token(), "");
}

TEST_F(AdapterServiceTest, CheckpointsGoRoundTrip) {
  auto save = Make<v1::SaveCheckpointRequest>(
      "adapter_id = 'a'; name = 'epoch-1'; "
      "kind = CHECKPOINT_KIND_SAMPLER; ttl_seconds = 60");
  (*save.mutable_metadata())["loss"] = "0.5";
  const auto saved = Answer<v1::SaveCheckpointResponse>(save);
  EXPECT_EQ(saved.checkpoint().name(), "epoch-1");
  EXPECT_EQ(saved.checkpoint().size_bytes(), 4096u);
  EXPECT_EQ(saved.checkpoint().created_at(), 1700000000);
  EXPECT_EQ(saved.checkpoint().kind(), v1::CHECKPOINT_KIND_SAMPLER);
  EXPECT_EQ(saved.checkpoint().expires_at(), 1700000060);
  EXPECT_EQ(saved.checkpoint().metadata().at("loss"), "0.5");
  EXPECT_EQ(saved.checkpoint().tenant(), "a");
  EXPECT_EQ(saved.checkpoint().base_model(), "canned");
  EXPECT_EQ(saved.checkpoint().base_fingerprint(), "c0ffee");
  EXPECT_EQ(Send(save).error_code(), grpc::StatusCode::ALREADY_EXISTS);

  auto load = Make<v1::LoadCheckpointRequest>(
      "adapter_id = 'copy'; source_adapter_id = 'a'; name = 'epoch-1'");
  const auto loaded = Answer<v1::LoadCheckpointResponse>(load);
  EXPECT_EQ(loaded.adapter().adapter_id(), "copy");
  load.clear_source_adapter_id();
  EXPECT_EQ(Send(load).error_code(), grpc::StatusCode::NOT_FOUND);

  auto expire = Make<v1::SetCheckpointTtlRequest>(
      "adapter_id = 'a'; name = 'epoch-1'; ttl_seconds = 600");
  v1::SetCheckpointTtlResponse expiring;
  const double now = absl::ToUnixSeconds(absl::Now());
  ASSERT_TRUE(Send(expire, &expiring).ok());
  EXPECT_GE(expiring.checkpoint().expires_at(), now + 600);
  expire.clear_ttl_seconds();
  ASSERT_TRUE(Send(expire, &expiring).ok());
  EXPECT_EQ(expiring.checkpoint().expires_at(), 0);
  expire.set_name("none");
  EXPECT_EQ(Send(expire, &expiring).error_code(), grpc::StatusCode::NOT_FOUND);

  const auto list =
      Answer<v1::ListCheckpointsResponse>(v1::ListCheckpointsRequest());
  EXPECT_EQ(list.checkpoints_size(), 1);

  const auto erase =
      Make<v1::DeleteCheckpointRequest>("adapter_id = 'a'; name = 'epoch-1'");
  EXPECT_TRUE(Send(erase).ok());
  EXPECT_EQ(Send(erase).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdapterServiceTest, SnapshotsArePublishedAndReleased) {
  const auto publish =
      Make<v1::PublishSnapshotRequest>("adapter_id = 'a'; name = 'best'");
  const auto published = Answer<v1::PublishSnapshotResponse>(publish);
  EXPECT_EQ(published.version(), 1u);
  const auto release =
      Make<v1::ReleaseSnapshotRequest>("adapter_id = 'a'; name = 'best'");
  EXPECT_TRUE(Send(release).ok());
  EXPECT_EQ(Send(release).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdapterServiceTest, ImportThenExportReturnsTheSameBytes) {
  const std::string half(700 << 10, 'x');
  v1::ImportAdapterResponse imported;
  const grpc::Status status =
      Import({Options("in"), Chunk("adapter_config.json", "{\"r\": 8}"),
              Chunk("adapter_model.safetensors", half),
              Chunk("adapter_model.safetensors", half + "tail"),
              Chunk("empty.txt", "")},
             &imported);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(imported.adapter().adapter_id(), "in");

  const auto request = Make<v1::ExportAdapterRequest>("adapter_id = 'in'");
  grpc::ClientContext context;
  const auto stream = adapters_->ExportAdapter(&context, request);
  PeftFiles files;
  v1::ExportAdapterResponse message;
  while (stream->Read(&message)) {
    EXPECT_LE(message.chunk().data().size(), size_t{1} << 20);
    if (files.empty() || files.back().first != message.chunk().name()) {
      files.emplace_back(message.chunk().name(), "");
    }
    files.back().second += message.chunk().data();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(files,
            (PeftFiles{{"adapter_config.json", "{\"r\": 8}"},
                       {"adapter_model.safetensors", half + half + "tail"},
                       {"empty.txt", ""}}));
}

TEST_F(AdapterServiceTest, UploadsRefuseBadStreams) {
  const auto upload = [this](
                          const std::vector<v1::UploadCheckpointRequest>& parts,
                          v1::UploadCheckpointResponse* response) {
    grpc::ClientContext context;
    const auto stream = adapters_->UploadCheckpoint(&context, response);
    for (const v1::UploadCheckpointRequest& part : parts) stream->Write(part);
    stream->WritesDone();
    return stream->Finish();
  };
  const auto options = Make<v1::UploadCheckpointRequest>(
      "options.adapter_id = 'a'; options.name = 'c'");
  const auto chunk =
      Make<v1::UploadCheckpointRequest>("chunk.name = 'adapter_config.json'");
  v1::UploadCheckpointRequest bad_name = options;
  bad_name.mutable_options()->set_name("../c");
  v1::UploadCheckpointRequest bad_id = options;
  bad_id.mutable_options()->clear_adapter_id();
  const std::pair<std::vector<v1::UploadCheckpointRequest>, std::string>
      cases[] = {{{}, "options is required"},
                 {{chunk}, "options is required in the first message"},
                 {{options}, "never named adapter_config.json"},
                 {{options, options}, "options is sent again"},
                 {{bad_name, chunk}, "options.name is \"../c\""},
                 {{bad_id, chunk}, "options.adapter_id"}};
  for (const auto& [parts, message] : cases) {
    v1::UploadCheckpointResponse response;
    const grpc::Status status = upload(parts, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), testing::HasSubstr(message));
  }
  v1::UploadCheckpointResponse response;
  EXPECT_TRUE(upload({options, chunk}, &response).ok());
  EXPECT_EQ(response.checkpoint().name(), "c");
}

TEST_F(AdapterServiceTest, DurabilityIsKeptAndChecked) {
  auto request = Make<v1::CreateAdapterRequest>(
      "adapter_id = 'kept'; durability = DURABILITY_STEP");
  auto response = Answer<v1::CreateAdapterResponse>(request);
  EXPECT_EQ(response.adapter().durability(), v1::DURABILITY_STEP);
  request.set_adapter_id("other");
  request.set_durability(static_cast<v1::Durability>(2));
  const grpc::Status bad = Send(request, &response);
  EXPECT_EQ(bad.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(bad.error_message(), "durability is 2, must be a known Durability");
}

TEST_F(AdapterServiceTest, ExportSurvivesAClientThatLeaves) {
  v1::ImportAdapterResponse imported;
  std::vector<v1::ImportAdapterRequest> messages = {
      Options("big"), Chunk("adapter_config.json", "{}")};
  for (int i = 0; i < 3; ++i) {
    messages.push_back(
        Chunk("adapter_model.safetensors", std::string(1 << 20, 'x')));
  }
  ASSERT_TRUE(Import(messages, &imported).ok());
  {
    const auto request = Make<v1::ExportAdapterRequest>("adapter_id = 'big'");
    grpc::ClientContext context;
    const auto stream = adapters_->ExportAdapter(&context, request);
    v1::ExportAdapterResponse message;
    EXPECT_TRUE(stream->Read(&message));
    context.TryCancel();
    stream->Finish();
  }
  EXPECT_TRUE(
      Eventually([&] { return MetricValue("weft_requests_inflight") == 0; }));
}

TEST_F(AdapterServiceTest, AClientThatDoesNotReadOrSendIsCutOff) {
  engine_.ExportNext(
      {{"adapter_config.json", "{}"},
       {"adapter_model.safetensors", std::string(size_t{64} << 20, 'x')}});
  const auto request = Make<v1::ExportAdapterRequest>("adapter_id = 'a'");
  grpc::ClientContext reading;
  const auto unread = adapters_->ExportAdapter(&reading, request);
  v1::ExportAdapterResponse message;
  ASSERT_TRUE(unread->Read(&message));
  v1::ImportAdapterResponse response;
  grpc::ClientContext sending;
  const auto half = adapters_->ImportAdapter(&sending, &response);
  ASSERT_TRUE(half->Write(Options("half")));
  EXPECT_TRUE(
      Eventually([&] { return MetricValue("weft_requests_inflight") == 2; }));
  const absl::Time now = SteadyNow();
  listeners_->CancelStalledCalls(now + StalledCalls::kPatience / 2);
  EXPECT_EQ(MetricValue("weft_requests_inflight"), 2);
  EXPECT_TRUE(Eventually([&] {
    listeners_->CancelStalledCalls(now + 3 * StalledCalls::kPatience);
    return MetricValue("weft_requests_inflight") == 0;
  }));
  EXPECT_EQ(half->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (unread->Read(&message)) {
  }
  EXPECT_EQ(unread->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(AdapterServiceTest, ImportsAreBoundedTogether) {
  std::vector<v1::ImportAdapterRequest> messages = {
      Options("big"), Chunk("adapter_config.json", "{}")};
  for (int i = 0; i < 5; ++i) {
    messages.push_back(
        Chunk("adapter_model.safetensors", std::string(1 << 20, 'x')));
  }
  v1::ImportAdapterResponse response;
  const grpc::Status status = Import(messages, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--max-import-bytes 4194304"));
  // When an import is answered, the bytes that it held are free again.
  messages.resize(5);
  for (int i = 0; i < 3; ++i) {
    messages[0] = Options(absl::StrCat("large", i));
    ASSERT_TRUE(Import(messages, &response).ok()) << i;
  }
}

TEST_F(AdapterServiceTest, CancelledImportMakesNoAdapter) {
  {
    v1::ImportAdapterResponse response;
    grpc::ClientContext context;
    const auto stream = adapters_->ImportAdapter(&context, &response);
    stream->Write(Options("half"));
    stream->Write(Chunk("adapter_config.json", "{}"));
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(
      Eventually([&] { return MetricValue("weft_requests_inflight") == 0; }));
  const auto get = Make<v1::GetAdapterRequest>("adapter_id = 'half'");
  EXPECT_EQ(Send(get).error_code(), grpc::StatusCode::NOT_FOUND);
}

struct ImportRow {
  const char* name;
  std::vector<v1::ImportAdapterRequest> messages;
  const char* error;
};

TEST_F(AdapterServiceTest, ImportRefusesBadStreams) {
  std::vector<v1::ImportAdapterRequest> many_files = {Options("x")};
  for (int i = 0; i < 17; ++i) {
    many_files.push_back(Chunk("f" + std::to_string(i), "x"));
  }
  const std::vector<ImportRow> rows = {
      {"nothing", {}, "options is required in the first message"},
      {"chunk first",
       {Chunk("adapter_config.json", "{}")},
       "options is required in the first message"},
      {"options twice", {Options("x"), Options("x")}, "options is sent again"},
      {"empty part", {v1::ImportAdapterRequest()}, "part is required"},
      {"bad id", {Options("../x")}, "options.adapter_id is \"../x\""},
      {"no id", {Options("")}, "options.adapter_id is required"},
      {"path", {Options("x"), Chunk("a/b", "")}, "chunk.name is \"a/b\""},
      {"no name", {Options("x"), Chunk("", "x")}, "chunk.name is required"},
      {"large chunk",
       {Options("x"), Chunk("f", std::string((1 << 20) + 1, 'x'))},
       "chunk.data has 1048577 bytes, must be at most 1048576"},
      {"mixed files",
       {Options("x"), Chunk("a", "1"), Chunk("b", "2"), Chunk("a", "3")},
       "chunk.name is \"a\" again after another file"},
      {"many files", many_files, "chunk.name starts file 17"},
      {"no config",
       {Options("x"), Chunk("adapter_model.safetensors", "x")},
       "chunk never named adapter_config.json"}};
  for (const ImportRow& row : rows) {
    SCOPED_TRACE(row.name);
    v1::ImportAdapterResponse response;
    const grpc::Status status = Import(row.messages, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(row.error));
  }
}

}  // namespace
}  // namespace weft::server
