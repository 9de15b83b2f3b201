// Streams of two libraries: which are the same, and how one waits for the other.
#pragma once

namespace cudnn_jax {

// 0 and 1 are both the legacy default stream.
bool same_stream(const void* a, const void* b);
// What is launched on `stream` from now on starts after all that is on `other` now. Called with the device's
// context bound.
void order_after(void* stream, void* other);
// The device that an address belongs to, -1 for one that the driver does not know.
int device_of_address(const void* address);

}  // namespace cudnn_jax
