#include "src/store/credentials.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "src/base/clock.h"
#include "src/base/files/operator_file.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/store/environment.h"
#include "src/store/xml.h"

namespace weft::store {
namespace {

constexpr absl::Duration kRenewBefore = absl::Minutes(5);
constexpr absl::Duration kRetryAfter = absl::Seconds(10);

constexpr char kContainerHost[] = "http://169.254.170.2";
constexpr char kMachineHost[] = "http://169.254.169.254";

absl::StatusOr<std::string> ReadText(const std::string& variable,
                                     const std::string& path) {
  const absl::StatusOr<std::string> text = ReadOperatorFile(path);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(variable, "=", path, ": ", text.status().message()));
  }
  return std::string(absl::StripAsciiWhitespace(*text));
}

// Converts a time of the wall clock, such as "2027-01-31T00:00:00Z".
absl::StatusOr<absl::Time> SteadyTime(const std::string& text) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, text, &time, &error)) {
    return absl::UnavailableError(absl::StrCat("it expires at \"", text, "\""));
  }
  return SteadyNow() + (time - absl::Now());
}

absl::StatusOr<Credentials> FromJson(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const auto field = [&](const char* name) -> std::string {
    const auto it = json.find(name);
    return it != json.end() && it->is_string() ? it->get<std::string>() : "";
  };
  if (!json.is_object() || field("AccessKeyId").empty() ||
      field("SecretAccessKey").empty()) {
    return absl::UnavailableError("the answer has no credentials");
  }
  Credentials found = {.key_id = field("AccessKeyId"),
                       .secret_key = field("SecretAccessKey"),
                       .session_token = field("Token")};
  if (const std::string expires = field("Expiration"); !expires.empty()) {
    WEFT_ASSIGN_OR_RETURN(found.expires, SteadyTime(expires));
  }
  return found;
}

// Returns the body of an answer with status 200.
absl::StatusOr<std::string> BodyOf(absl::StatusOr<HttpAnswer> answer) {
  if (!answer.ok()) return answer.status();
  if (answer->status != 200) {
    return absl::Status(answer->status / 100 == 4
                            ? absl::StatusCode::kPermissionDenied
                            : absl::StatusCode::kUnavailable,
                        absl::StrCat("HTTP ", answer->status));
  }
  return std::move(answer->body);
}

absl::Status At(const std::string& place, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("credentials of ", place,
                                                  ": ", status.message()));
}

absl::StatusOr<Credentials> FromVariables(const std::string& key_id) {
  Credentials found = {.key_id = key_id,
                       .secret_key = Environment({"AWS_SECRET_ACCESS_KEY"}),
                       .session_token = Environment({"AWS_SESSION_TOKEN"})};
  if (found.secret_key.empty()) {
    return absl::InvalidArgumentError(
        "AWS_ACCESS_KEY_ID is set, but not AWS_SECRET_ACCESS_KEY");
  }
  return found;
}

// Returns NOT_FOUND if there is no file or no such profile, and nothing asks
// for them.
absl::StatusOr<Credentials> FromFile() {
  std::string path = Environment({"AWS_SHARED_CREDENTIALS_FILE"});
  const std::string wanted = Environment({"AWS_PROFILE"});
  const bool asked = !path.empty() || !wanted.empty();
  if (path.empty()) path = Environment({"HOME"}) + "/.aws/credentials";
  const absl::StatusOr<std::string> text = ReadOperatorFile(path);
  const absl::StatusOr<Credentials> found =
      text.ok() ? ParseProfile(*text, wanted.empty() ? "default" : wanted)
                : text.status();
  if (found.ok() || (absl::IsNotFound(found.status()) && !asked)) return found;
  return absl::InvalidArgumentError(
      absl::StrCat("credentials file ", path, ": ", found.status().message()));
}

}  // namespace

absl::StatusOr<Credentials> ParseProfile(std::string_view text,
                                         const std::string& profile) {
  std::optional<Credentials> found;
  bool inside = false;
  for (absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (absl::StartsWith(line, "[") && absl::EndsWith(line, "]")) {
      inside = absl::StripAsciiWhitespace(line.substr(1, line.size() - 2)) ==
               profile;
      if (inside && !found) found.emplace();
      continue;
    }
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (!inside || absl::StartsWith(line, "#")) continue;
    const std::string name =
        absl::AsciiStrToLower(absl::StripAsciiWhitespace(pair.first));
    const std::string value(absl::StripAsciiWhitespace(pair.second));
    if (name == "aws_access_key_id") found->key_id = value;
    if (name == "aws_secret_access_key") found->secret_key = value;
    if (name == "aws_session_token") found->session_token = value;
  }
  if (!found) {
    return absl::NotFoundError(absl::StrCat("no profile [", profile, "]"));
  }
  if (found->key_id.empty() || found->secret_key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("profile [", profile,
                     "] lacks aws_access_key_id or aws_secret_access_key"));
  }
  return *found;
}

absl::StatusOr<Credentials> CredentialSource::FromWebIdentity(
    const std::string& token_file) {
  const std::string role = Environment({"AWS_ROLE_ARN"});
  if (role.empty()) {
    return absl::InvalidArgumentError(
        "AWS_WEB_IDENTITY_TOKEN_FILE is set, but not AWS_ROLE_ARN");
  }
  WEFT_ASSIGN_OR_RETURN(const std::string token,
                        ReadText("AWS_WEB_IDENTITY_TOKEN_FILE", token_file));
  std::string session = Environment({"AWS_ROLE_SESSION_NAME"});
  if (session.empty()) session = "weft";
  std::string url = Environment({"AWS_ENDPOINT_URL_STS"});
  if (url.empty()) {
    url = absl::StrCat("https://sts.", region_, ".amazonaws.com",
                       absl::StartsWith(region_, "cn-") ? ".cn/" : "/");
  }
  const std::string form = absl::StrCat(
      "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=",
      PercentEncode(role), "&RoleSessionName=", PercentEncode(session),
      "&WebIdentityToken=", PercentEncode(token));
  const absl::StatusOr<HttpAnswer> answer = http_->Send(
      {.method = "POST",
       .url = url,
       .headers = {"content-type: application/x-www-form-urlencoded"},
       .body = {form}});
  if (!answer.ok()) return At("STS", answer.status());
  const absl::StatusOr<XmlElement> xml = ParseXml(answer->body);
  const XmlElement* result =
      xml.ok() ? xml->Find("AssumeRoleWithWebIdentityResult") : nullptr;
  const XmlElement* keys = result ? result->Find("Credentials") : nullptr;
  if (answer->status != 200 || keys == nullptr) {
    const XmlElement* error = xml.ok() ? xml->Find("Error") : nullptr;
    const std::string why = error != nullptr ? error->TextOf("Code") : "";
    return absl::Status(
        answer->status / 100 == 4 ? absl::StatusCode::kPermissionDenied
                                  : absl::StatusCode::kUnavailable,
        absl::StrCat("STS does not give the credentials of ", role, ": HTTP ",
                     answer->status, " ", why));
  }
  WEFT_ASSIGN_OR_RETURN(const absl::Time expires,
                        SteadyTime(keys->TextOf("Expiration")));
  return Credentials{.key_id = keys->TextOf("AccessKeyId"),
                     .secret_key = keys->TextOf("SecretAccessKey"),
                     .session_token = keys->TextOf("SessionToken"),
                     .expires = expires};
}

absl::StatusOr<Credentials> CredentialSource::FromContainer(
    const std::string& url) {
  std::string token = Environment({"AWS_CONTAINER_AUTHORIZATION_TOKEN"});
  constexpr char kTokenFile[] = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
  if (const std::string path = Environment({kTokenFile}); !path.empty()) {
    WEFT_ASSIGN_OR_RETURN(token, ReadText(kTokenFile, path));
  }
  HttpRequest request = {.url = url, .direct = true};
  if (!token.empty()) request.headers = {"authorization: " + token};
  const absl::StatusOr<std::string> body = BodyOf(http_->Send(request));
  if (!body.ok()) return At("the container's role", body.status());
  return FromJson(*body);
}

absl::StatusOr<Credentials> CredentialSource::FromMachine() {
  std::string host = Environment({"AWS_EC2_METADATA_SERVICE_ENDPOINT"});
  if (host.empty()) host = kMachineHost;
  const auto ask = [&](const char* method, const std::string& path,
                       const std::string& header) {
    return BodyOf(http_->Send({.method = method,
                               .url = host + path,
                               .headers = {header},
                               .connect_limit = absl::Seconds(1),
                               .limit = absl::Seconds(2),
                               .direct = true}));
  };
  WEFT_ASSIGN_OR_RETURN(const std::string token,
                        ask("PUT", "/latest/api/token",
                            "x-aws-ec2-metadata-token-ttl-seconds: 21600"));
  const std::string header = "x-aws-ec2-metadata-token: " + token;
  const std::string path = "/latest/meta-data/iam/security-credentials/";
  WEFT_ASSIGN_OR_RETURN(const std::string role, ask("GET", path, header));
  WEFT_ASSIGN_OR_RETURN(
      const std::string body,
      ask("GET", path + std::string(absl::StripAsciiWhitespace(role)), header));
  return FromJson(body);
}

absl::StatusOr<Credentials> CredentialSource::Find() {
  if (const auto id = Environment({"AWS_ACCESS_KEY_ID"}); !id.empty()) {
    return FromVariables(id);
  }
  const std::string token = Environment({"AWS_WEB_IDENTITY_TOKEN_FILE"});
  if (!token.empty()) return FromWebIdentity(token);
  absl::StatusOr<Credentials> found = FromFile();
  if (!absl::IsNotFound(found.status())) return found;
  const std::string full = Environment({"AWS_CONTAINER_CREDENTIALS_FULL_URI"});
  if (!full.empty()) return FromContainer(full);
  const std::string path =
      Environment({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"});
  if (!path.empty()) return FromContainer(kContainerHost + path);
  std::string machine = "AWS_EC2_METADATA_DISABLED is true";
  if (!absl::EqualsIgnoreCase(Environment({"AWS_EC2_METADATA_DISABLED"}),
                              "true")) {
    found = FromMachine();
    if (found.ok() || absl::IsCancelled(found.status())) return found;
    machine = std::string(found.status().message());
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "no credentials for the store: set AWS_ACCESS_KEY_ID and "
      "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run with a pod's or a "
      "machine's role (",
      machine, ")"));
}

absl::StatusOr<Credentials> CredentialSource::Get() {
  {
    // While one thread asks for new ones, others go on with those that still
    // hold. They wait only if none do.
    MutexLock lock(&mu_);
    for (;;) {
      const absl::Time now = SteadyNow();
      const bool hold = current_ && now < current_->expires;
      if (hold && (now < renew_at_ || renewing_)) return *current_;
      if (!renewing_) break;
      renewed_.Wait(&mu_);
    }
    renewing_ = true;
  }
  absl::StatusOr<Credentials> found = Find();
  MutexLock lock(&mu_);
  renewing_ = false;
  renewed_.NotifyAll();
  const absl::Time now = SteadyNow();
  if (found.ok()) {
    // Half of a short life is enough.
    renew_at_ = std::max(found->expires - kRenewBefore,
                         now + (found->expires - now) / 2);
    current_ = *found;
    return found;
  }
  if (!current_ || absl::IsCancelled(found.status())) return found.status();
  if (now < current_->expires) {
    renew_at_ = now + kRetryAfter;
    Log(LogLevel::kWarning, "the store's credentials were not renewed",
        {{"error", found.status().message()}});
    return *current_;
  }
  return absl::UnavailableError(absl::StrCat(
      "the store's credentials have expired: ", found.status().message()));
}

void CredentialSource::Expire(const std::string& key_id) {
  MutexLock lock(&mu_);
  if (current_ && current_->key_id == key_id) {
    renew_at_ = absl::InfinitePast();
    current_->expires = absl::InfinitePast();
  }
}

}  // namespace weft::store
