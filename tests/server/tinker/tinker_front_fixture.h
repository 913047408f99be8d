// The handlers of the Tinker front over a canned engine, without sockets.
#ifndef WEFT_TESTS_SERVER_TINKER_TINKER_FRONT_FIXTURE_H_
#define WEFT_TESTS_SERVER_TINKER_TINKER_FRONT_FIXTURE_H_

#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "server/call/service_core.h"
#include "server/tinker/front.h"
#include "src/base/tokens.h"
#include "tests/support/canned_engine.h"
#include "tests/support/temp_folder.h"

namespace weft::server::tinker {

class TinkerFrontTest : public ::testing::Test {
 protected:
  TinkerFrontTest();
  ~TinkerFrontTest() override;

  // Makes a token and returns its API key. Call it before Start.
  std::string AddKey(const std::string& id, std::set<Scope> scopes,
                     const std::string& tenant = "acme");
  // Starts an engine and a front. If AddKey made tokens, the front requires
  // them.
  void Start(ServerOptions options = {});
  // Ends the front and starts a new front, which reads the ledger. In between,
  // the engine does the work that it held.
  void Restart();
  // Like Restart, but with a new, empty engine.
  void RestartAll();

  // Runs `work` on the front's thread and waits for its end.
  void OnFront(const std::function<void(Front&)>& work);
  // Sends a request with the key `key_`, `forwarded_proto_`,
  // `idempotency_key_` and `door_`.
  std::future<HttpReply> AskLater(const std::string& method,
                                  const std::string& path,
                                  const Json& body = Json::object());
  HttpReply Ask(const std::string& method, const std::string& path,
                const Json& body = Json::object());
  // Like Ask, for a POST request with a body of another type or encoding.
  HttpReply Send(const std::string& path, const std::string& type,
                 const std::string& encoding, const std::string& body);
  // Sends a POST request and expects status 200. Returns the reply.
  Json Post(const std::string& path, const Json& body = Json::object());
  // Returns the result of a future, and waits for it.
  Json Result(const Json& promise);

  std::string NewSession();
  // Starts an engine and a front, and returns a new session.
  std::string StartSession();
  std::future<HttpReply> CreateModelLater(const std::string& session,
                                          int number = 0);
  Json CreateModel(const std::string& session, int number = 0);
  Json Train(const std::string& model, int seq);
  std::future<HttpReply> TrainLater(const std::string& model, int seq);
  // Makes a model and saves its weights for sampling; returns the path.
  std::string SaveSampler(const std::string& session);
  // Makes a model and saves its external weights; returns the path of the
  // request for their URLs.
  std::string SaveExternal();
  // Returns a model input or prompt of these tokens.
  static Json Prompt(const std::vector<int>& tokens);
  // Makes a sampling session of the base model; returns its id.
  std::string NewSampler(const std::string& session, int number = 1);
  // Asks for a sample of two tokens; returns the promise. `fields` say from
  // what, and may replace the others.
  Json Sample(const Json& fields);
  void Finish(const std::string& session);
  // Makes a sampling session from a checkpoint.
  std::future<HttpReply> SampleFromLater(const std::string& session,
                                         const std::string& path,
                                         int number = 0);
  HttpReply SampleFrom(const std::string& session, const std::string& path,
                       int number = 0);
  // Returns how often the RPC was called on the engine.
  int Calls(const std::string& rpc) const;
  std::future<HttpReply> SendLater(HttpRequest request, std::string body);
  void StartFront();
  void StopFront();
  // Wait up to 30 s for `condition`. Return whether it became true.
  static bool Eventually(const std::function<bool()>& condition);
  bool EventuallyInFront(const std::function<bool(Front&)>& condition);
  // Waits until the front has no adapters to delete.
  void AwaitDeletions();

  std::string key_ = "tml-any";
  std::string forwarded_proto_;
  std::string idempotency_key_;
  std::string door_;   // The header of an edge that can send requests on.
  bool keeps_ = true;  // Whether the server has a state folder.
  std::unique_ptr<CannedEngine> engine_;
  std::unique_ptr<prometheus::Registry> registry_;

 private:
  const TempFolder folder_;
  std::vector<TokenEntry> records_;
  ServerOptions options_;
  std::unique_ptr<ServiceCore> core_;
  std::shared_ptr<HttpServer> server_;
  std::unique_ptr<Front> front_;
};

}  // namespace weft::server::tinker

#endif  // WEFT_TESTS_SERVER_TINKER_TINKER_FRONT_FIXTURE_H_
