// Compiled twins of the numpy loops in moments.py, placement.py, search.py and score.py.
//
// Contract: the same bits as numpy. Built with -ffp-contract=off and without -ffast-math; every floating expression
// keeps the
// association of its twin, every sum runs in the twin's order, integer sums are exact. Change both sides or neither.
// No allocation survives a call; no globals: calls from several threads are independent.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t LCM = 720720;
constexpr int QUANT = 2047;
constexpr double DRIFT_ROOT = 1.7320508075688772;
constexpr int POWER_LOG2 = 6;
constexpr double PHI_CAP = 4e4;
constexpr double KEEP = 1.0 - 1e-9;
constexpr int64_t EXCHANGES_PER_SLOT = 32;
constexpr double INV_POWER = 1.0 / (1 << POWER_LOG2);
constexpr double INF = std::numeric_limits<double>::infinity();

inline double phi(double x) {
    x *= INV_POWER;
    x += 1.0;
    x = x > 0.0 ? x : 0.0;
    x = x < PHI_CAP ? x : PHI_CAP;
    for (int k = 0; k < POWER_LOG2; ++k) x *= x;
    return x;
}

// Position of the first smallest element.
int64_t first_min(const double* v, int64_t n) {
    double lane[16];
    for (double& x : lane) x = INF;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int k = 0; k < 16; ++k) lane[k] = v[i + k] < lane[k] ? v[i + k] : lane[k];
    double least = INF;
    for (double x : lane) least = x < least ? x : least;
    for (; i < n; ++i) least = v[i] < least ? v[i] : least;
    for (i = 0; i < n; ++i)
        if (v[i] == least) return i;
    return 0;
}

// out[i] = sum over ranks-ordered values, left to right.
double ordered_sum(const std::vector<double>& v) {
    double s = 0.0;
    for (double x : v) s += x;
    return s;
}

// Exact integer product q^T q for |q| <= QUANT: int16 pairs into int32, flushed to int64 every 512 steps (2047^2 * 512
// < 2^31).
// q is [experts padded to TILE, steps padded to 32], padding zero; 4 x 4 tiles keep 16 sums in registers.
constexpr int64_t TILE = 4;

void gram(const std::vector<int16_t>& q, int64_t padded, int64_t experts, double* out) {
    constexpr int64_t FLUSH = 512;
    for (int64_t e = 0; e < experts; e += TILE) {
        for (int64_t f = e; f < experts; f += TILE) {
            int64_t acc[TILE][TILE] = {};
            for (int64_t lo = 0; lo < padded; lo += FLUSH) {
                const int64_t n = std::min(FLUSH, padded - lo);
                const int16_t *a0 = q.data() + e * padded + lo, *a1 = a0 + padded, *a2 = a1 + padded, *a3 = a2 + padded;
                const int16_t *b0 = q.data() + f * padded + lo, *b1 = b0 + padded, *b2 = b1 + padded, *b3 = b2 + padded;
                int32_t s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
                int32_t s20 = 0, s21 = 0, s22 = 0, s23 = 0, s30 = 0, s31 = 0, s32 = 0, s33 = 0;
                for (int64_t t = 0; t < n; ++t) {
                    const int32_t x0 = a0[t], x1 = a1[t], x2 = a2[t], x3 = a3[t];
                    const int32_t y0 = b0[t], y1 = b1[t], y2 = b2[t], y3 = b3[t];
                    s00 += x0 * y0; s01 += x0 * y1; s02 += x0 * y2; s03 += x0 * y3;
                    s10 += x1 * y0; s11 += x1 * y1; s12 += x1 * y2; s13 += x1 * y3;
                    s20 += x2 * y0; s21 += x2 * y1; s22 += x2 * y2; s23 += x2 * y3;
                    s30 += x3 * y0; s31 += x3 * y1; s32 += x3 * y2; s33 += x3 * y3;
                }
                const int32_t all[TILE * TILE] = {s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33};
                for (int64_t k = 0; k < TILE * TILE; ++k) acc[k / TILE][k % TILE] += all[k];
            }
            for (int64_t i = 0; i < TILE && e + i < experts; ++i)
                for (int64_t j = 0; j < TILE && f + j < experts; ++j)
                    out[(e + i) * experts + f + j] = out[(f + j) * experts + e + i] = double(acc[i][j]);
        }
    }
}

struct Search {
    int64_t R, S, P, E;
    std::vector<int64_t> slot;
    const double* cov_EE = nullptr;
    std::vector<double> load_E, part_E, K2, V2, load, diag, gain, loss, x, ph, ua;
    std::vector<uint8_t> has, fresh;
    bool warm = false;
    int64_t received = 0;

    double total() const { return ordered_sum(ph); }

    void mark(int64_t r) {
        std::fill_n(has.begin() + r * E, E, uint8_t(0));
        for (int64_t s = 0; s < S; ++s) has[r * E + slot[r * S + s]] = 1;
    }

    void reset(int64_t r) {
        for (int64_t p = r * S; p < (r + 1) * S; ++p) loss[p] = x[r] + ((diag[p] - load[p]) - V2[r * P + p]);
    }

    void fill(double sharp) {
        for (int64_t i = 0; i < P; ++i) {
            const double *c = cov_EE + slot[i] * E;
            const double wi = part_E[slot[i]];
            for (int64_t p = 0; p < P; ++p) K2[i * P + p] = c[slot[p]] * (wi * part_E[slot[p]]);
        }
        std::vector<double> var(R), mu(R);
        for (int64_t r = 0; r < R; ++r) {
            double* v = &V2[r * P];
            std::memcpy(v, &K2[r * S * P], P * sizeof(double));
            for (int64_t s = 1; s < S; ++s) {
                const double* k = &K2[(r * S + s) * P];
                for (int64_t p = 0; p < P; ++p) v[p] += k[p];
            }
            var[r] = v[r * S];
            mu[r] = load_E[slot[r * S]];
            for (int64_t s = 1; s < S; ++s) {
                var[r] += v[r * S + s];
                mu[r] += load_E[slot[r * S + s]];
            }
        }
        double spread = 0.0;
        for (double v : var) spread += std::sqrt(v > 0.0 ? v : 0.0);
        const double mean_spread = spread / double(R);
        const double b = sharp / (mean_spread > 1e-4 ? mean_spread : 1e-4);
        const double half = 0.5 * b * b, twice = 2.0 * half;
        for (int64_t p = 0; p < P; ++p) {
            load[p] = load_E[slot[p]] * b;
            diag[p] = K2[p * P + p] * half;
            gain[p] = load[p] + diag[p];
        }
        for (double& k : K2) k *= twice;
        for (double& v : V2) v *= twice;
        const double base = half * (ordered_sum(var) / double(R));
        for (int64_t r = 0; r < R; ++r) {
            x[r] = ((mu[r] - 1.0) * b + var[r] * half) - base;
            ph[r] = phi(x[r]);
        }
        for (int64_t r = 0; r < R; ++r) reset(r);
    }

    // The best exchange of a slot of rank a; false when none gains enough.
    bool best(int64_t a, double tol, double price, int64_t cap, int64_t& bi, int64_t& bp, double& xa, double& xb) {
        const double whole = total(), own = double(R) * ph[a];
        const double scale = own < whole ? own : whole;
        double least = INF;
        int64_t at = -1;
        for (int64_t s = 0; s < S; ++s) {
            const int64_t i = a * S + s, e = slot[i];
            const double *k = &K2[i * P], *va = &V2[a * P];
            const double li = loss[i], gi = gain[i];
            for (int64_t p = 0; p < P; ++p) ua[p] = phi((li + (gain[p] + va[p])) - k[p]);
            for (int64_t r = 0; r < R; ++r) {
                const double there = gi + V2[r * P + i], phr = ph[r] * KEEP;
                for (int64_t p = r * S; p < (r + 1) * S; ++p) {
                    const double ub_p = phi((there + loss[p]) - k[p]);
                    ua[p] = (ua[p] + ub_p) - phr;
                }
            }
            if (warm) {
                for (int64_t r = 0; r < R; ++r) {
                    const int64_t in = int64_t(fresh[r * E + e]) - int64_t(fresh[a * E + e]);
                    for (int64_t p = r * S; p < (r + 1) * S; ++p) {
                        const int64_t d = in + (int64_t(fresh[a * E + slot[p]]) - int64_t(fresh[r * E + slot[p]]));
                        ua[p] += double(d) * price;
                        if (cap >= 0 && d > 0 && received + d > cap) ua[p] = INF;
                    }
                }
            }
            for (int64_t p = 0; p < P; ++p)
                if (has[a * E + slot[p]]) ua[p] = INF;
            for (int64_t r = 0; r < R; ++r)
                if (has[r * E + e]) std::fill_n(ua.begin() + r * S, S, INF);
            const int64_t p = first_min(ua.data(), P);
            if (at < 0 || ua[p] < least) {
                least = ua[p];
                at = s * P + p;
            }
        }
        if (!(least < ph[a] - tol * scale)) return false;
        bi = a * S + at / P;
        bp = at % P;
        const int64_t b = bp / S;
        xa = (loss[bi] + (gain[bp] + V2[a * P + bp])) - K2[bi * P + bp];
        xb = ((gain[bi] + V2[b * P + bi]) + loss[bp]) - K2[bi * P + bp];
        return true;
    }

    void swap_rows(std::vector<double>& m, int64_t i, int64_t p) {
        std::swap_ranges(m.begin() + i * P, m.begin() + (i + 1) * P, m.begin() + p * P);
        for (int64_t r = 0; r < P; ++r) std::swap(m[r * P + i], m[r * P + p]);
    }

    void exchange(int64_t a, int64_t i, int64_t p, double xa, double xb) {
        const int64_t b = p / S, e = slot[i], f = slot[p];
        if (warm)
            received += int64_t(fresh[a * E + f]) - int64_t(fresh[a * E + e]) + int64_t(fresh[b * E + e]) - int64_t(fresh[b * E + f]);
        slot[i] = f;
        slot[p] = e;
        mark(a);
        mark(b);
        swap_rows(K2, i, p);
        for (int64_t r = 0; r < R; ++r) std::swap(V2[r * P + i], V2[r * P + p]);
        for (int64_t q = 0; q < P; ++q) {
            const double shift = K2[i * P + q] - K2[p * P + q];
            V2[a * P + q] += shift;
            V2[b * P + q] -= shift;
        }
        std::swap(load[i], load[p]);
        std::swap(diag[i], diag[p]);
        std::swap(gain[i], gain[p]);
        x[a] = xa;
        x[b] = xb;
        ph[a] = phi(xa);
        ph[b] = phi(xb);
        reset(a);
        reset(b);
    }

    int64_t descend(double tol, double price, int64_t cap) {
        std::vector<uint8_t> live(R, 1);
        int64_t swaps = 0;
        while (swaps < EXCHANGES_PER_SLOT * P) {
            int64_t a = -1;
            for (int64_t r = 0; r < R; ++r)
                if (live[r] && (a < 0 || ph[r] > ph[a])) a = r;
            if (a < 0) break;
            int64_t i = 0, p = 0;
            double xa = 0.0, xb = 0.0;
            if (!best(a, tol, price, cap, i, p, xa, xb)) {
                live[a] = 0;
                continue;
            }
            exchange(a, i, p, xa, xb);
            live[a] = live[p / S] = 1;
            ++swaps;
        }
        return swaps;
    }
};

}  // namespace

extern "C" {

// Covariance of shares around mean_E from counts [M, E] int64 with `stride` elements between steps, all with tokens, and
// `blocks` weighted block sums [blocks, E]; `all` is the tokens of the window.
void dl_covariance(const int64_t* counts, int64_t M, int64_t E, int64_t stride, const int64_t* block_BE, int64_t blocks, int64_t all,
                   const double* mean_E, double* cov_EE) {
    const int64_t steps = M, rows = steps + blocks;
    std::vector<const int64_t*> at(rows);
    std::vector<double> tokens(rows), root(rows);
    for (int64_t k = 0; k < rows; ++k) {
        at[k] = k < steps ? counts + k * stride : block_BE + (k - steps) * E;
        int64_t n = 0;
        for (int64_t e = 0; e < E; ++e) n += at[k][e];
        tokens[k] = double(n);
        root[k] = 1.0 / std::sqrt(tokens[k]);
    }
    std::vector<double> peak(E, 0.0), y(E);
    auto deviations = [&](int64_t k) {
        const int64_t* c = at[k];
        const double n = tokens[k], r = root[k];
        for (int64_t e = 0; e < E; ++e) y[e] = (double(c[e]) - mean_E[e] * n) * r;
        if (k >= steps)
            for (int64_t e = 0; e < E; ++e) y[e] *= DRIFT_ROOT;
    };
    for (int64_t k = 0; k < rows; ++k) {
        deviations(k);
        for (int64_t e = 0; e < E; ++e) {
            const double d = std::fabs(y[e]);
            peak[e] = d > peak[e] ? d : peak[e];
        }
    }
    std::vector<double> unit(E), scale(E);
    for (int64_t e = 0; e < E; ++e) {
        const double u = peak[e] > 0 ? peak[e] : 1.0;
        unit[e] = double(QUANT) / u;
        scale[e] = u / double(QUANT);
    }
    const int64_t padded = (rows + 31) / 32 * 32;
    std::vector<int16_t> q((E + TILE - 1) / TILE * TILE * padded, int16_t(0));
    constexpr int64_t BLOCK = 32;
    std::vector<int16_t> tile(BLOCK * E);
    for (int64_t lo = 0; lo < rows; lo += BLOCK) {
        const int64_t n_rows = std::min(BLOCK, rows - lo);
        for (int64_t k = 0; k < n_rows; ++k) {
            deviations(lo + k);
            for (int64_t e = 0; e < E; ++e) tile[k * E + e] = int16_t(int32_t(std::nearbyint(y[e] * unit[e])));
        }
        for (int64_t e = 0; e < E; ++e)
            for (int64_t k = 0; k < n_rows; ++k) q[e * padded + lo + k] = tile[k * E + e];
    }
    gram(q, padded, E, cov_EE);
    for (int64_t e = 0; e < E; ++e)
        for (int64_t f = 0; f < E; ++f) cov_EE[e * E + f] = (scale[e] * scale[f]) * cov_EE[e * E + f] / double(all);
}

void dl_replica_counts(const int64_t* weight_E, int64_t E, int64_t spare, int64_t cap, int64_t* copies_E) {
    std::vector<int64_t> score(E);
    for (int64_t e = 0; e < E; ++e) {
        score[e] = weight_E[e] * LCM;
        copies_E[e] = 1;
    }
    for (int64_t k = 0; k < spare; ++k) {
        const int64_t e = std::max_element(score.begin(), score.end()) - score.begin();
        ++copies_E[e];
        score[e] = copies_E[e] < cap ? weight_E[e] * LCM / copies_E[e] : -1;
    }
}

void dl_longest_first(const int64_t* load_E, const int64_t* order, const int64_t* copies_E, int64_t E, int64_t R, int64_t S,
                      int64_t* slot_RS) {
    std::vector<int64_t> rank_load(R, 0), used(R, 0);
    std::vector<int64_t> held_by(R, -1);
    for (int64_t k = 0; k < E; ++k) {
        const int64_t e = order[k];
        for (int64_t c = 0; c < copies_E[e]; ++c) {
            int64_t best = -1;
            bool best_fresh = false;
            for (int64_t r = 0; r < R; ++r) {
                if (used[r] >= S) continue;
                const bool is_fresh = held_by[r] != e;
                if (best < 0 || (is_fresh && !best_fresh) || (is_fresh == best_fresh && rank_load[r] < rank_load[best])) {
                    best = r;
                    best_fresh = is_fresh;
                }
            }
            slot_RS[best * S + used[best]++] = e;
            rank_load[best] += load_E[e];
            held_by[best] = e;
        }
    }
}

// Improves slot_RS in place. fresh_RE (1 = the rank does not hold the expert yet) may be null. Returns the exchanges
// made.
int64_t dl_swap_search(int64_t* slot_RS, int64_t R, int64_t S, int64_t E, const double* mean_E, const double* cov_EE,
                       const int64_t* copies_E, double sharp, double tol, double price, int64_t cap, const uint8_t* fresh_RE) {
    Search s;
    const int64_t P = R * S;
    s.R = R; s.S = S; s.P = P; s.E = E;
    s.slot.assign(slot_RS, slot_RS + P);
    s.load_E.resize(E);
    s.part_E.resize(E);
    for (int64_t e = 0; e < E; ++e) {
        s.part_E[e] = 1.0 / double(copies_E[e]);
        s.load_E[e] = mean_E[e] * s.part_E[e];
    }
    s.cov_EE = cov_EE;
    s.K2.resize(P * P);
    s.V2.resize(R * P);
    for (auto* v : {&s.load, &s.diag, &s.gain, &s.loss, &s.ua}) v->resize(P);
    s.x.resize(R);
    s.ph.resize(R);
    s.has.assign(R * E, 0);
    for (int64_t r = 0; r < R; ++r) s.mark(r);
    if (fresh_RE) {
        s.warm = true;
        s.fresh.assign(fresh_RE, fresh_RE + R * E);
        for (int64_t p = 0; p < P; ++p) s.received += s.fresh[(p / S) * E + s.slot[p]];
    }
    s.fill(sharp);
    const int64_t swaps = s.descend(tol, price, cap);
    std::copy(s.slot.begin(), s.slot.end(), slot_RS);
    return swaps;
}

// Sum over steps of the largest rank load, in units of 1/LCM token.
int64_t dl_peak_sum(const int64_t* counts, int64_t M, int64_t E, int64_t stride, const int64_t* slot_RS, const int64_t* copies_E, int64_t R,
                    int64_t S) {
    std::vector<int64_t> unit(E), scaled(E);
    for (int64_t e = 0; e < E; ++e) unit[e] = LCM / copies_E[e];
    int64_t sum = 0;
    for (int64_t t = 0; t < M; ++t) {
        const int64_t* c = counts + t * stride;
        for (int64_t e = 0; e < E; ++e) scaled[e] = c[e] * unit[e];
        int64_t peak = 0;
        for (int64_t r = 0; r < R; ++r) {
            int64_t load = 0;
            for (int64_t s = 0; s < S; ++s) load += scaled[slot_RS[r * S + s]];
            peak = std::max(peak, load);
        }
        sum += peak;
    }
    return sum;
}

}  // extern "C"
