// Writes the bytes of one Event whose fields hold -1, -2, ... in the order of their declaration.
#include <cstdio>

#include "record/event.h"

int main() {
  ddp_lab::Event event;
  event.sequence = static_cast<std::uint64_t>(-1);
  event.host_ns = -2;
  event.device_begin_ns = -3;
  event.device_end_ns = -4;
  event.bytes = -5;
  event.step = -6;
  event.reducer = -7;
  event.process_group = -8;
  event.bucket = -9;
  event.parameter = -10;
  event.kind = static_cast<ddp_lab::Kind>(-11);
  event.reserved = static_cast<std::uint8_t>(-12);
  event.generation = static_cast<std::uint16_t>(-13);
  event.thread = static_cast<std::uint32_t>(-14);
  return std::fwrite(&event, sizeof event, 1, stdout) == 1 ? 0 : 1;
}
