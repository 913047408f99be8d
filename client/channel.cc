#include "client/channel.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"

namespace weft::client {
namespace {

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  // The client does not limit the size of messages. The server does.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // A machine that dies says nothing, and another has its state in seconds.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 15'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  // gRPC takes it for the time limit of a connection, too. Another address may
  // have to be tried.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2'500);
  return arguments;
}

}  // namespace

bool IsLocalTarget(absl::string_view target) {
  if (absl::ConsumePrefix(&target, "unix:")) return true;
  for (const char* const scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&target, scheme)) break;
  }
  // The target has the form [V6]:PORT, HOST:PORT or HOST.
  if (absl::ConsumePrefix(&target, "[")) {
    return target.substr(0, target.find(']')) == "::1";
  }
  const std::string host(target.substr(0, target.rfind(':')));
  in_addr address = {};
  return host == "localhost" ||
         (inet_pton(AF_INET, host.c_str(), &address) == 1 &&
          ntohl(address.s_addr) >> 24 == 127);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(
    const std::string& target, const Security& security) {
  grpc::ChannelArguments arguments = Arguments();
  if (!std::ranges::all_of(security.token, absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        "the token has a character that is not visible ASCII, which no token "
        "has: copy the token again");
  }
  if (security.certificate.empty() != security.private_key.empty()) {
    return absl::InvalidArgumentError(
        "a client's certificate and its private key go together");
  }
  // A proxy that the environment names would look for this machine's server on
  // its own machine, and could read the token.
  if (IsLocalTarget(target)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (security.UsesTls()) {
    if (!security.server_name.empty()) {
      arguments.SetSslTargetNameOverride(security.server_name);
    }
    return grpc::CreateCustomChannel(
        target,
        grpc::SslCredentials({.pem_root_certs = security.root_certificates,
                              .pem_private_key = security.private_key,
                              .pem_cert_chain = security.certificate}),
        arguments);
  }
  if (!security.token.empty() && !IsLocalTarget(target)) {
    return absl::FailedPreconditionError(
        "the token would be sent in plaintext, for anybody on the way to read: "
        "use TLS");
  }
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(),
                                   arguments);
}

}  // namespace weft::client
