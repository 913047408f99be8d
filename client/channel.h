// Opens the client's channel to its server: plaintext, TLS or mutual TLS.
#ifndef WEFT_CLIENT_CHANNEL_H_
#define WEFT_CLIENT_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// The protection of a channel. If `tls` is false and both `root_certificates`
// and `certificate` are empty, the channel is plaintext.
struct Security {
  // Sent as `authorization: Bearer ...`. Empty: no token.
  std::string token = {};
  // Uses TLS with the system's certificate authorities. If `root_certificates`
  // or `certificate` is set, the channel uses TLS even if `tls` is false.
  bool tls = false;
  std::string root_certificates = {};  // PEM, replaces the system's CAs.
  // The client's certificate and its key, in PEM, for mutual TLS.
  std::string certificate = {};
  std::string private_key = {};
  // The name that the server's certificate must have. Empty: the target's host.
  std::string server_name = {};

  bool UsesTls() const {
    return tls || !root_certificates.empty() || !certificate.empty();
  }
};

// Returns whether the target is on this machine, where plaintext is private.
// Local targets are 127.0.0.0/8, [::1], localhost and unix:PATH.
bool IsLocalTarget(absl::string_view target);

// Opens a channel, which connects at the first call. Errors:
// FAILED_PRECONDITION if a token would leave the machine in plaintext;
// INVALID_ARGUMENT for a certificate without its key, a key without its
// certificate, or a token with a character that no token has. The error does
// not show the token.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(
    const std::string& target, const Security& security);

}  // namespace weft::client

#endif  // WEFT_CLIENT_CHANNEL_H_
