// fp8 numbers (e4m3) as bf16, which holds each exactly: emulated products go through the bf16 matmul.
#include <cstdint>
#include <cstring>

extern "C" {

// count numbers -> bf16. What is below the normal ones is a multiple of 2^-9; the code of NaN does not occur.
void unpack_fp8(const uint8_t* numbers, int64_t count, uint16_t* out) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < count; i++) {
    const uint32_t v = numbers[i], size = v & 127;
    const float tiny = (float)size * 0x1p-9f;
    uint32_t bits;
    std::memcpy(&bits, &tiny, 4);
    bits = size < 8 ? bits : (size << 20) + (120u << 23);
    out[i] = (uint16_t)((bits >> 16) | (v & 128) << 8);
  }
}

}
