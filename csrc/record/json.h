#pragma once

#include <array>
#include <cstdio>
#include <string>
#include <string_view>

namespace ddp_lab {

// An object of JSON that grows.
class Json {
 public:
  void add(const char* name, std::string_view text) {
    begin(name);
    made_ += '"';
    for (const char one : text) {
      const auto code = static_cast<unsigned char>(one);
      if (code >= 0x20 && one != '"' && one != '\\') {
        made_ += one;
        continue;
      }
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", code);
      made_ += escaped.data();
    }
    made_ += '"';
  }

  void add(const char* name, int number) {
    begin(name);
    made_ += std::to_string(number);
  }

  std::string text() const { return made_ + '}'; }

 private:
  void begin(const char* name) {
    made_ += made_.empty() ? '{' : ',';
    made_ = made_ + '"' + name + "\":";
  }

  std::string made_;
};

}  // namespace ddp_lab
