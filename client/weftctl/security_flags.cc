#include "client/weftctl/security_flags.h"

#include <cstdlib>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "src/base/operator_file.h"

namespace weft::weftctl {
namespace {

std::string FromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns the content of the file that the flag or its default names; "" if
// neither names a file.
absl::StatusOr<std::string> ReadFile(const Arguments& arguments,
                                     const std::string& flag) {
  const std::string path = arguments.GetString(flag);
  if (path.empty()) return std::string();
  absl::StatusOr<std::string> contents = ReadOperatorFile(path);
  if (!contents.ok()) {
    return UsageError(absl::StrCat("--", flag, ": cannot read ", path, ": ",
                                   contents.status().message()));
  }
  if (contents->empty()) {
    return UsageError(absl::StrCat("--", flag, ": ", path, " is empty"));
  }
  return contents;
}

}  // namespace

std::vector<FlagSpec> SecurityFlags() {
  return {
      {"token-file", "FILE",
       "the token to send, or WEFT_TOKEN_FILE; WEFT_TOKEN is a token itself",
       FromEnvironment("WEFT_TOKEN_FILE")},
      {"tls", "", "TLS with the authorities of the system, or WEFT_TLS=1", ""},
      {"ca", "FILE", "TLS with these authorities (PEM), or WEFT_CA",
       FromEnvironment("WEFT_CA")},
      {"client-cert", "FILE", "for mutual TLS (PEM), or WEFT_CLIENT_CERT",
       FromEnvironment("WEFT_CLIENT_CERT")},
      {"client-key", "FILE", "its private key (PEM), or WEFT_CLIENT_KEY",
       FromEnvironment("WEFT_CLIENT_KEY")},
      {"server-name", "NAME",
       "the name in the server's certificate, or WEFT_SERVER_NAME",
       FromEnvironment("WEFT_SERVER_NAME")}};
}

absl::StatusOr<client::Security> ReadSecurity(const Arguments& arguments) {
  client::Security security;
  const struct {
    const char* flag;
    std::string* contents;
  } files[] = {{"token-file", &security.token},
               {"ca", &security.root_certificates},
               {"client-cert", &security.certificate},
               {"client-key", &security.private_key}};
  for (const auto& file : files) {
    absl::StatusOr<std::string> contents = ReadFile(arguments, file.flag);
    if (!contents.ok()) return contents.status();
    *file.contents = *std::move(contents);
  }
  // --token-file takes precedence over WEFT_TOKEN, which takes precedence over
  // WEFT_TOKEN_FILE.
  const std::string token = FromEnvironment("WEFT_TOKEN");
  if (!token.empty() && !arguments.Has("token-file")) security.token = token;
  absl::StripAsciiWhitespace(&security.token);
  security.tls = arguments.Has("tls") || FromEnvironment("WEFT_TLS") == "1";
  security.server_name = arguments.GetString("server-name");
  return security;
}

}  // namespace weft::weftctl
