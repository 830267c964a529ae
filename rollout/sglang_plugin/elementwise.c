/* What stands between the products of a layer, one call each for all new tokens, in float32; elementwise.py compiles and calls it.
 *
 * Torch takes eight operators for a norm and eighteen for the rotary angles; with few tokens starting them takes longer than the products.
 * Compiled without fused operations, and with torch's own order of additions, so that the bits are those of the operators. */
#include <math.h>
#include <stdint.h>

#define LANES 8                      /* torch's sums have as many partial ones in a register, and ROWS registers */
#define ROWS 4
#define LEVELS 4                     /* sums of sums */
#define FEW 32                       /* rows that one thread is done with before others are awake */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

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
void norm(const float *x, const float *residual, float *sums, const float *weight, float *out, int64_t rows, int64_t size, float eps)
{
#pragma omp parallel for schedule(static) if (rows > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = out + row * size;
        if (residual) {
            for (int64_t i = 0; i < size; i++)
                sums[row * size + i] = from[i] + residual[row * size + i];
            from = sums + row * size;
        }
        const float scale = 1.0f / sqrtf(sum_of_squares(from, size) / (float)size + eps);
        for (int64_t i = 0; i < size; i++)
            to[i] = from[i] * scale * weight[i];
    }
}

static void turn(const float *x, int64_t stride, float *out, const float *angles, const int64_t *positions, int64_t tokens, int64_t heads,
                 int64_t size)
{
    const int64_t half = size / 2;
#pragma omp parallel for schedule(static) if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosine = angles + positions[t] * size, *sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) {
            const float *restrict from = x + t * stride + h * size;
            float *restrict to = out + (t * heads + h) * size;
            for (int64_t i = 0; i < half; i++) {
                to[i] = from[i] * cosine[i] - from[half + i] * sine[i];
                to[half + i] = from[half + i] * cosine[i] + from[i] * sine[i];
            }
        }
    }
}

/* Rotary embedding of whole heads in two halves. query, key: tokens are as many numbers apart as their strides say; angles: size / 2 cosines
 * and as many sines for each position; the results are [tokens][heads][size]. */
void rotate(const float *query, int64_t query_stride, float *query_out, int64_t heads, const float *key, int64_t key_stride, float *key_out,
            int64_t key_heads, const float *angles, const int64_t *positions, int64_t tokens, int64_t size)
{
    turn(query, query_stride, query_out, angles, positions, tokens, heads, size);
    turn(key, key_stride, key_out, angles, positions, tokens, key_heads, size);
}
