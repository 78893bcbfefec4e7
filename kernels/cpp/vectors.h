// Vectors of float32 for the kernels of this folder: GCC's vector extensions, which become AVX2, AVX-512 or NEON.
// Compiled by `aerie.kernels.cpp_library`.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

template <class V>
INLINE V load(const void *from) {
    V out;
    memcpy(&out, from, sizeof(V));
    return out;
}

INLINE void store(float *to, Vec value) { memcpy(to, &value, sizeof(Vec)); }

INLINE Vec broadcast(float value) { return value - Vec{}; }  // not `+`: adding 0 would change -0, so it would be computed

INLINE Vec of_bfloat16(HalfVec value) { return (Vec)(__builtin_convertvector(value, IntVec) << 16); }

INLINE Vec of_bytes(ByteVec value) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)value));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)value)));
#else
    return __builtin_convertvector(__builtin_convertvector(value, IntVec), Vec);
#endif
}

// The 16 signed halves of bytes, less 8: the lower ones, and the upper ones.
INLINE void of_nibbles(const void *from, Vec (&low)[16 / LANES], Vec (&high)[16 / LANES]) {
#if defined(__AVX2__)
    const __m128i both = _mm_loadu_si128((const __m128i *)from), mask = _mm_set1_epi8(15), zero = _mm_set1_epi8(8);
    const __m128i a = _mm_sub_epi8(_mm_and_si128(both, mask), zero);
    const __m128i b = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(both, 4), mask), zero);
#if defined(__AVX512F__)
    low[0] = of_bytes((ByteVec)a), high[0] = of_bytes((ByteVec)b);
#else
    low[0] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a));
    low[1] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
    high[0] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    high[1] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)));
#endif
#else
    for (int p = 0; p < 16 / LANES; p++) {
        const ByteVec both = load<ByteVec>((const char *)from + p * LANES);
        low[p] = of_bytes((both & 15) - 8);
        high[p] = of_bytes(((both >> 4) & 15) - 8);
    }
#endif
}

INLINE float sum(Vec value) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
}

// The sum of `count` numbers, in an order that depends on `count` alone.
INLINE float sum_of(const float *x, int64_t count) {
    Vec parts = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) parts += load<Vec>(x + i);
    float total = sum(parts);
    for (; i < count; i++) total += x[i];
    return total;
}

// exp(x) for x <= 88; 0 below -87, NaN for NaN. Relative error below 2^-22: x = n ln 2 + r with |r| <= ln 2 / 2, and the minimax
// polynomial of degree 6 of Cephes' expf for exp(r).
INLINE Vec exponential(Vec x) {
    const Vec low = broadcast(-87.0f);
    const IntVec is_low = x < low;
    x = is_low ? low : x;
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = x * 1.44269504088896341f + magic;
    const Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntVec power = ((IntVec)shifted - (IntVec)magic) << 23;
    const Vec out = (Vec)((IntVec)p + power);
    return x != x ? x : is_low ? Vec{} : out;
}

// x / (1 + exp(-x)); 0 below -87.
INLINE Vec silu(Vec x) {
    const Vec limit = broadcast(-87.0f);
    return x < limit ? Vec{} : x / (exponential(-x) + 1.0f);
}
