/* What stands between the products of a layer, one call each for all new tokens; elementwise.py compiles and calls it. ELEMENT is the type of
 * the tensors, FLOAT32 or BFLOAT16: then a norm is computed in float32 and rounded once, and rotary angles round after each operation.
 *
 * Torch takes eight operators for a norm and eighteen for the rotary angles; with few tokens starting them takes longer than the products.
 * Compiled without fused operations, and with torch's own order of additions, so that the bits are those of the operators. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8                      /* torch's sums have as many partial ones in a register, and ROWS registers */
#define ROWS 4
#define LEVELS 4                     /* sums of sums */
#define FEW 32                       /* rows that one thread is done with before others are awake */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

#define FLOAT32 1
#define BFLOAT16 2
#if ELEMENT == FLOAT32
typedef float element;
static inline float wide(element x) { return x; }
static inline element narrow(float x) { return x; }
#else
typedef uint16_t element;            /* the upper half of a float */
static inline float wide(element x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline element narrow(float x) /* to the nearest, of two as near to the even one */
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
#endif
static inline float rounded(float x) { return wide(narrow(x)); }

/* Sum of squares of `size` numbers as torch adds up a row: cascade_sum in aten/src/ATen/native/cpu/SumKernel.cpp. */
static float sum_of_squares(const float *x, int64_t size)
{
    const int64_t vectors = size / LANES, steps = vectors / ROWS;
    int power = 0;
    while (((int64_t)1 << power) < steps)
        power++;
    power = power / LEVELS > 4 ? power / LEVELS : 4;
    vec sum[LEVELS][ROWS] = {0};
    int64_t i = 0;
    while (i + ((int64_t)1 << power) <= steps) {
        for (int64_t j = 0; j < (int64_t)1 << power; j++, i++)
            for (int r = 0; r < ROWS; r++) {
                const vec v = *(const vec *)(x + (i * ROWS + r) * LANES);
                sum[0][r] += v * v;
            }
        for (int level = 1; level < LEVELS; level++) {
            for (int r = 0; r < ROWS; r++) {
                sum[level][r] += sum[level - 1][r];
                sum[level - 1][r] = (vec){0};
            }
            if (i & ((((int64_t)1 << power) - 1) << (level * power)))
                break;
        }
    }
    for (; i < steps; i++)
        for (int r = 0; r < ROWS; r++) {
            const vec v = *(const vec *)(x + (i * ROWS + r) * LANES);
            sum[0][r] += v * v;
        }
    for (int level = 1; level < LEVELS; level++)
        for (int r = 0; r < ROWS; r++)
            sum[0][r] += sum[level][r];
    for (int64_t k = steps * ROWS; k < vectors; k++) {
        const vec v = *(const vec *)(x + k * LANES);
        sum[0][0] += v * v;
    }
    for (int r = 1; r < ROWS; r++)
        sum[0][0] += sum[0][r];
    float total = 0;
    for (int64_t k = vectors * LANES; k < size; k++) {
        const float square = x[k] * x[k];
        total += square;
    }
    for (int lane = 0; lane < LANES; lane++)
        total += sum[0][0][lane];
    return total;
}

/* out = weight * (s / sqrt(mean(s^2) + eps)) of each row; s is x, or x + residual, which is then written to `sums`. All [rows][size]. */
void norm(const element *x, const element *residual, element *sums, const element *weight, element *out, int64_t rows, int64_t size,
          float eps)
{
#pragma omp parallel for schedule(static) if (rows > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * size;
        float whole[size];
        for (int64_t i = 0; i < size; i++)
            whole[i] = wide(x[first + i]);
        if (residual)
            for (int64_t i = 0; i < size; i++) {
                whole[i] += wide(residual[first + i]);
                sums[first + i] = narrow(whole[i]);
            }
        const float scale = 1.0f / sqrtf(sum_of_squares(whole, size) / (float)size + eps);
        for (int64_t i = 0; i < size; i++)
            out[first + i] = narrow(whole[i] * scale * wide(weight[i]));
    }
}

static void turn(const element *x, int64_t stride, element *out, const float *angles, const int64_t *positions, int64_t tokens, int64_t heads,
                 int64_t size)
{
    const int64_t half = size / 2;
#pragma omp parallel for schedule(static) if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosine = angles + positions[t] * size, *sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) {
            const element *restrict from = x + t * stride + h * size;
            element *restrict to = out + (t * heads + h) * size;
            for (int64_t i = 0; i < half; i++) {
                const float left = wide(from[i]), right = wide(from[half + i]), c = rounded(cosine[i]), s = rounded(sine[i]);
                to[i] = narrow(rounded(left * c) - rounded(right * s));
                to[half + i] = narrow(rounded(right * c) + rounded(left * s));
            }
        }
    }
}

/* Rotary embedding of whole heads in two halves. query, key: tokens are as many numbers apart as their strides say; angles: size / 2 cosines
 * and as many sines for each position; the results are [tokens][heads][size]. */
void rotate(const element *query, int64_t query_stride, element *query_out, int64_t heads, const element *key, int64_t key_stride,
            element *key_out, int64_t key_heads, const float *angles, const int64_t *positions, int64_t tokens, int64_t size)
{
    turn(query, query_stride, query_out, angles, positions, tokens, heads, size);
    turn(key, key_stride, key_out, angles, positions, tokens, key_heads, size);
}
