// Compiled twins of the numpy loops in moments.py, placement.py, search.py and score.py.
//
// Contract: the same bits as numpy. Built with -ffp-contract=off and without -ffast-math; every floating expression
// keeps the
// association of its twin, every sum runs in the twin's order, integer sums are exact. Change both sides or neither.
// Each thread keeps scratch for its next call, nothing else: calls from several threads are independent.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr int64_t LCM = 720720;
constexpr int QUANT = 2047;
constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52
constexpr double DRIFT_ROOT = 1.7320508075688772;
constexpr int POWER_LOG2 = 6;
constexpr double PHI_CAP = 4e4;
constexpr double KEEP = 1.0 - 1e-9;
constexpr int64_t EXCHANGES_PER_SLOT = 32;
constexpr double INV_POWER = 1.0 / (1 << POWER_LOG2);
// Costs of what is not allowed; above every sum of two phi, which stay below 1e295.
constexpr double BARRED = 1e300;

inline double phi(double y) {
    y = y > 0.0 ? y : 0.0;
    y = y < PHI_CAP ? y : PHI_CAP;
    for (int k = 0; k < POWER_LOG2; ++k) y *= y;
    return y;
}

double least_of(const double* v, int64_t n) {
    double lane[16];
    for (double& x : lane) x = BARRED;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int k = 0; k < 16; ++k) lane[k] = v[i + k] < lane[k] ? v[i + k] : lane[k];
    double least = BARRED;
    for (double x : lane) least = x < least ? x : least;
    for (; i < n; ++i) least = v[i] < least ? v[i] : least;
    return least;
}

// Sum left to right.
double ordered_sum(const std::vector<double>& v) {
    double s = 0.0;
    for (double x : v) s += x;
    return s;
}

// Exact integer product q^T q for |q| <= QUANT: int16 pairs into int32, flushed to int64 every 512 columns (2047^2 * 512
// < 2^31).
// q is [experts padded to TILE, columns padded to 32], padding zero; 3 x 4 tiles keep 12 sums in registers.
constexpr int64_t TILE_E = 3, TILE_F = 4, TILE = TILE_E * TILE_F;

void gram(const int16_t* q, int64_t padded, int64_t experts, double* out) {
    constexpr int64_t FLUSH = 512;
    for (int64_t e = 0; e < experts; e += TILE_E) {
        for (int64_t f = e / TILE_F * TILE_F; f < experts; f += TILE_F) {
            int64_t acc[TILE_E][TILE_F] = {};
            for (int64_t lo = 0; lo < padded; lo += FLUSH) {
                const int64_t n = std::min(FLUSH, padded - lo);
                const int16_t *a0 = q + e * padded + lo, *a1 = a0 + padded, *a2 = a1 + padded;
                const int16_t *b0 = q + f * padded + lo, *b1 = b0 + padded, *b2 = b1 + padded, *b3 = b2 + padded;
                int32_t s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0, s20 = 0, s21 = 0, s22 = 0, s23 = 0;
                for (int64_t t = 0; t < n; ++t) {
                    const int32_t x0 = a0[t], x1 = a1[t], x2 = a2[t], y0 = b0[t], y1 = b1[t], y2 = b2[t], y3 = b3[t];
                    s00 += x0 * y0; s01 += x0 * y1; s02 += x0 * y2; s03 += x0 * y3;
                    s10 += x1 * y0; s11 += x1 * y1; s12 += x1 * y2; s13 += x1 * y3;
                    s20 += x2 * y0; s21 += x2 * y1; s22 += x2 * y2; s23 += x2 * y3;
                }
                const int32_t all[TILE] = {s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23};
                for (int64_t k = 0; k < TILE; ++k) acc[k / TILE_F][k % TILE_F] += all[k];
            }
            for (int64_t i = 0; i < TILE_E && e + i < experts; ++i)
                for (int64_t j = 0; j < TILE_F && f + j < experts; ++j)
                    out[(e + i) * experts + f + j] = out[(f + j) * experts + e + i] = double(acc[i][j]);
        }
    }
}

// Scratch of one search, kept by its thread for the next one: fresh pages cost more than the search's arithmetic.
struct Scratch {
    std::vector<double> K2, V2;
    std::vector<int16_t> q;

    template <typename T>
    static T* of(std::vector<T>& v, int64_t n) {
        if (int64_t(v.size()) < n) v.resize(n);
        return v.data();
    }
};

thread_local Scratch scratch;

struct Search {
    int64_t R, S, P, E;
    std::vector<int64_t> slot;
    const double* cov_EE;
    double *K2, *V2;  // K2 [P, P]: row i lags behind by the exchanges after seen[i]; V2 [R, P]
    std::vector<double> load_E, part_E, load, diag, gain, loss, y, ph;
    std::vector<double> cost, keep, here, other, barred, there;  // scratch of best()
    std::vector<double> bar_RE;      // BARRED where the rank holds the expert, else 0
    std::vector<uint8_t> holds_ER, fresh;
    std::vector<std::pair<int64_t, int64_t>> done;  // exchanged slots, in order
    std::vector<size_t> seen;
    bool warm = false;
    int64_t received = 0;

    Search(const int64_t* slot_RS, int64_t R, int64_t S, int64_t E, const double* mean_E, const double* cov_EE, const int64_t* copies_E,
           const uint8_t* fresh_RE)
        : R(R), S(S), P(R * S), E(E), slot(slot_RS, slot_RS + P), cov_EE(cov_EE), K2(Scratch::of(scratch.K2, P * P)),
          V2(Scratch::of(scratch.V2, R * P)), load_E(E), part_E(E), load(P), diag(P), gain(P), loss(P), y(R), ph(R), cost(P), keep(P),
          here(P), other(P), barred(P), there(R), bar_RE(R * E, 0.0), holds_ER(R * E, 0), seen(P, 0) {
        for (int64_t e = 0; e < E; ++e) {
            part_E[e] = double(R) / double(copies_E[e]);
            load_E[e] = mean_E[e] * part_E[e];
        }
        for (int64_t p = 0; p < P; ++p) set(p / S, slot[p], true);
        if (fresh_RE) {
            warm = true;
            fresh.assign(fresh_RE, fresh_RE + R * E);
            for (int64_t p = 0; p < P; ++p) received += fresh[(p / S) * E + slot[p]];
        }
    }

    double total() const { return ordered_sum(ph); }

    void set(int64_t r, int64_t e, bool held) {
        bar_RE[r * E + e] = held ? BARRED : 0.0;
        holds_ER[e * R + r] = held;
    }

    bool in_rank(int64_t r, int64_t e) const { return std::find(&slot[r * S], &slot[r * S] + S, e) != &slot[r * S] + S; }

    void reset(int64_t r) {
        for (int64_t p = r * S; p < (r + 1) * S; ++p) loss[p] = y[r] + ((diag[p] - load[p]) - V2[r * P + p]);
    }

    // Row i of K2, up to date.
    double* row(int64_t i) {
        double* k = K2 + i * P;
        for (; seen[i] < done.size(); ++seen[i]) std::swap(k[done[seen[i]].first], k[done[seen[i]].second]);
        return k;
    }

    void fill(double sharp) {
        std::vector<double> var(R), mu(R), part(P);
        for (int64_t p = 0; p < P; ++p) part[p] = part_E[slot[p]];
        auto cov = [&](int64_t i, int64_t p) { return cov_EE[slot[i] * E + slot[p]] * (part[i] * part[p]); };
        for (int64_t r = 0; r < R; ++r) {
            for (int64_t p = r * S; p < (r + 1) * S; ++p) {
                double v = cov(r * S, p);
                for (int64_t i = r * S + 1; i < (r + 1) * S; ++i) v += cov(i, p);
                var[r] = p == r * S ? v : var[r] + v;
                mu[r] = p == r * S ? load_E[slot[p]] : mu[r] + load_E[slot[p]];
            }
        }
        double spread = 0.0;
        for (double v : var) spread += std::sqrt(v > 0.0 ? v : 0.0);
        const double mean_spread = spread / double(R);
        const double sharpness = sharp / (mean_spread > 1e-4 ? mean_spread : 1e-4);
        const double b = sharpness * INV_POWER, half = 0.5 * sharpness * sharpness * INV_POWER, twice = 2.0 * half;
        for (int64_t r = 0; r < R; ++r) {
            double* v = V2 + r * P;
            for (int64_t i = r * S; i < (r + 1) * S; ++i) {
                const double* c = cov_EE + slot[i] * E;
                double* k = K2 + i * P;
                for (int64_t p = 0; p < P; ++p) k[p] = (c[slot[p]] * (part[i] * part[p])) * twice;
                for (int64_t p = 0; p < P; ++p) v[p] = i == r * S ? k[p] : v[p] + k[p];
            }
        }
        const double base = half * (ordered_sum(var) / double(R));
        for (int64_t p = 0; p < P; ++p) {
            load[p] = load_E[slot[p]] * b;
            diag[p] = cov(p, p) * half;
            gain[p] = load[p] + diag[p];
        }
        for (int64_t r = 0; r < R; ++r) {
            y[r] = (((mu[r] - 1.0) * b + var[r] * half) - base) + 1.0;
            ph[r] = phi(y[r]);
            reset(r);
        }
    }

    // Every rank's value in each of its slots.
    void spread(const std::vector<double>& by_rank, std::vector<double>& by_slot) const {
        for (int64_t r = 0; r < R; ++r)
            for (int64_t p = r * S; p < (r + 1) * S; ++p) by_slot[p] = by_rank[r];
    }

    // The price of exchanging slot i of rank a with every slot; BARRED where that would exceed the cap.
    void charge(int64_t a, int64_t e, double price, int64_t cap) {
        for (int64_t r = 0; r < R; ++r) {
            const int64_t in = int64_t(fresh[r * E + e]) - int64_t(fresh[a * E + e]);
            for (int64_t p = r * S; p < (r + 1) * S; ++p) {
                const int64_t d = in + (int64_t(fresh[a * E + slot[p]]) - int64_t(fresh[r * E + slot[p]]));
                cost[p] += double(d) * price;
                if (cap >= 0 && d > 0 && received + d > cap) cost[p] = BARRED;
            }
        }
    }

    // The best exchange of a slot of rank a; false when none gains enough.
    bool best(int64_t a, double tol, double price, int64_t cap, int64_t& bi, int64_t& bp, double& ya, double& yb) {
        const double whole = total(), own = double(R) * ph[a];
        const double scale = own < whole ? own : whole;
        for (int64_t r = 0; r < R; ++r) there[r] = ph[r] * KEEP;
        spread(there, keep);
        for (int64_t p = 0; p < P; ++p) here[p] = gain[p] + V2[a * P + p];
        for (int64_t p = 0; p < P; ++p) barred[p] = bar_RE[a * E + slot[p]];
        double least = BARRED;
        int64_t at = -1;
        for (int64_t s = 0; s < S; ++s) {
            const int64_t i = a * S + s, e = slot[i];
            for (int64_t r = 0; r < R; ++r) there[r] = gain[i] + V2[r * P + i];
            spread(there, other);
            const double li = loss[i], *k = row(i);
            for (int64_t p = 0; p < P; ++p) {
                const double y_here = (li + here[p]) - k[p], y_there = (other[p] + loss[p]) - k[p];
                cost[p] = (phi(y_here) + phi(y_there)) - keep[p];
            }
            if (warm) charge(a, e, price, cap);
            for (int64_t p = 0; p < P; ++p) cost[p] += barred[p];
            for (int64_t r = 0; r < R; ++r)
                if (holds_ER[e * R + r]) std::fill_n(cost.begin() + r * S, S, BARRED);
            const double low = least_of(cost.data(), P);
            if (at < 0 || low < least) {
                least = low;
                at = s * P + (std::find(cost.begin(), cost.end(), low) - cost.begin());
            }
        }
        if (!(least < ph[a] - tol * scale)) return false;
        bi = a * S + at / P;
        bp = at % P;
        const int64_t b = bp / S;
        ya = (loss[bi] + (gain[bp] + V2[a * P + bp])) - K2[bi * P + bp];
        yb = ((gain[bi] + V2[b * P + bi]) + loss[bp]) - K2[bi * P + bp];
        return true;
    }

    void exchange(int64_t a, int64_t i, int64_t p, double ya, double yb) {
        const int64_t b = p / S, e = slot[i], f = slot[p];
        if (warm)
            received += int64_t(fresh[a * E + f]) - int64_t(fresh[a * E + e]) + int64_t(fresh[b * E + e]) - int64_t(fresh[b * E + f]);
        slot[i] = f;
        slot[p] = e;
        set(a, e, in_rank(a, e));
        set(b, f, in_rank(b, f));
        set(a, f, true);
        set(b, e, true);
        double *ki = row(i), *kp = row(p);
        std::swap_ranges(ki, ki + P, kp);
        done.emplace_back(i, p);
        row(i);
        row(p);
        for (int64_t r = 0; r < R; ++r) std::swap(V2[r * P + i], V2[r * P + p]);
        for (int64_t q = 0; q < P; ++q) {
            const double shift = ki[q] - kp[q];
            V2[a * P + q] += shift;
            V2[b * P + q] -= shift;
        }
        std::swap(load[i], load[p]);
        std::swap(diag[i], diag[p]);
        std::swap(gain[i], gain[p]);
        y[a] = ya;
        y[b] = yb;
        ph[a] = phi(ya);
        ph[b] = phi(yb);
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
            double ya = 0.0, yb = 0.0;
            if (!best(a, tol, price, cap, i, p, ya, yb)) {
                live[a] = 0;
                continue;
            }
            exchange(a, i, p, ya, yb);
            live[a] = live[p / S] = 1;
            ++swaps;
        }
        return swaps;
    }
};

}  // namespace

extern "C" {

// Columns [E, M] int32 with `ld` elements between experts, and the tokens of every step, from counts [M, E] int64 with
// `stride` elements between steps. Returns 0 when a count does not fit, then the output is not complete.
int64_t dl_columns(const int64_t* counts, int64_t M, int64_t E, int64_t stride, int64_t ld, int32_t* out_EM, int64_t* tokens_M) {
    constexpr int64_t BLOCK = 16;
    std::vector<int32_t> tile(BLOCK * E);
    for (int64_t lo = 0; lo < M; lo += BLOCK) {
        const int64_t rows = std::min(BLOCK, M - lo);
        uint64_t seen = 0;
        for (int64_t k = 0; k < rows; ++k) {
            const int64_t* c = counts + (lo + k) * stride;
            int64_t n = 0;
            for (int64_t e = 0; e < E; ++e) {
                seen |= uint64_t(c[e]);
                tile[k * E + e] = int32_t(c[e]);
                n += c[e];
            }
            tokens_M[lo + k] = n;
        }
        if (seen >> 31) return 0;
        if (rows == BLOCK)
            for (int64_t e = 0; e < E; ++e)
                for (int64_t k = 0; k < BLOCK; ++k) out_EM[e * ld + lo + k] = tile[k * E + e];
        else
            for (int64_t e = 0; e < E; ++e)
                for (int64_t k = 0; k < rows; ++k) out_EM[e * ld + lo + k] = tile[k * E + e];
    }
    return 1;
}

// Sums [B, E] over consecutive steps; block b starts at steps[b], steps[B] = M.
void dl_block_sums(const int32_t* columns_EM, int64_t ld, int64_t E, const int64_t* steps, int64_t B, int64_t* out_BE) {
    for (int64_t e = 0; e < E; ++e)
        for (int64_t b = 0; b < B; ++b) {
            int64_t sum = 0;
            for (int64_t t = steps[b]; t < steps[b + 1]; ++t) sum += columns_EM[e * ld + t];
            out_BE[b * E + e] = sum;
        }
}

// Covariance of shares around mean_E from columns [E, M], all steps with tokens, and `blocks` weighted block sums
// [blocks, E]; `all` is the tokens of the window.
void dl_covariance(const int32_t* columns_EM, int64_t M, int64_t E, int64_t ld, const int64_t* tokens_M, const int64_t* block_BE,
                   int64_t blocks, int64_t all, const double* mean_E, double* cov_EE) {
    const int64_t cols = M + blocks, padded = (cols + 31) / 32 * 32;
    std::vector<double> tokens(cols), root(cols), scale(E), y(padded, 0.0);
    for (int64_t k = 0; k < cols; ++k) {
        int64_t n = 0;
        if (k < M) n = tokens_M[k];
        else
            for (int64_t e = 0; e < E; ++e) n += block_BE[(k - M) * E + e];
        tokens[k] = double(n);
        root[k] = 1.0 / std::sqrt(tokens[k]);
    }
    const int64_t lines = (E + TILE - 1) / TILE * TILE;
    int16_t* q = Scratch::of(scratch.q, lines * padded);
    std::fill(q + E * padded, q + lines * padded, int16_t(0));
    for (int64_t e = 0; e < E; ++e) {
        const int32_t* c = columns_EM + e * ld;
        const double m = mean_E[e];
        for (int64_t k = 0; k < M; ++k) y[k] = (double(c[k]) - m * tokens[k]) * root[k];
        for (int64_t k = M; k < cols; ++k) y[k] = ((double(block_BE[(k - M) * E + e]) - m * tokens[k]) * root[k]) * DRIFT_ROOT;
        double lane[8] = {};
        for (int64_t k = 0; k < padded; k += 8)
            for (int j = 0; j < 8; ++j) {
                const double d = std::fabs(y[k + j]);
                lane[j] = d > lane[j] ? d : lane[j];
            }
        const double peak = *std::max_element(lane, lane + 8);
        const double u = peak > 0 ? peak : 1.0, unit = double(QUANT) / u;
        scale[e] = u / double(QUANT);
        int16_t* row = q + e * padded;
        // Adding and taking away 1.5 * 2^52 rounds to the nearest integer, ties to even.
        for (int64_t k = 0; k < cols; ++k) row[k] = int16_t(int32_t((y[k] * unit + ROUND) - ROUND));
        std::fill(row + cols, row + padded, int16_t(0));
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

// Returns how many replicas had to share a rank with another of their expert.
int64_t dl_longest_first(const int64_t* load_E, const int64_t* order, const int64_t* copies_E, int64_t E, int64_t R, int64_t S,
                      int64_t* slot_RS) {
    std::vector<int64_t> rank_load(R, 0), used(R, 0);
    std::vector<int64_t> held_by(R, -1);
    int64_t shared = 0;
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
            shared += !best_fresh;
        }
    }
    return shared;
}

// Improves slot_RS in place. fresh_RE (1 = the rank does not hold the expert yet) may be null. Returns the exchanges
// made.
int64_t dl_swap_search(int64_t* slot_RS, int64_t R, int64_t S, int64_t E, const double* mean_E, const double* cov_EE,
                       const int64_t* copies_E, double sharp, double tol, double price, int64_t cap, const uint8_t* fresh_RE) {
    Search s(slot_RS, R, S, E, mean_E, cov_EE, copies_E, fresh_RE);
    s.fill(sharp);
    const int64_t swaps = s.descend(tol, price, cap);
    std::copy(s.slot.begin(), s.slot.end(), slot_RS);
    return swaps;
}

}  // extern "C"

namespace {

// Sum over steps of the largest rank load, in units of 1/unit token; unit_E = unit / copies. T must hold a rank's load.
template <typename T>
int64_t peaks(const int32_t* columns_EM, int64_t M, int64_t ld, const int64_t* slot_RS, const int64_t* unit_E, int64_t R, int64_t S) {
    constexpr int64_t CHUNK = 1024;
    T load[CHUNK], peak[CHUNK];
    int64_t sum = 0;
    for (int64_t lo = 0; lo < M; lo += CHUNK) {
        const int64_t n = std::min(CHUNK, M - lo);
        std::fill_n(peak, n, T(0));
        for (int64_t r = 0; r < R; ++r) {
            std::fill_n(load, n, T(0));
            for (int64_t s = 0; s < S; ++s) {
                const int64_t e = slot_RS[r * S + s];
                const int32_t* c = columns_EM + e * ld + lo;
                const T unit = T(unit_E[e]);
                for (int64_t t = 0; t < n; ++t) load[t] += T(c[t]) * unit;
            }
            for (int64_t t = 0; t < n; ++t) peak[t] = load[t] > peak[t] ? load[t] : peak[t];
        }
        for (int64_t t = 0; t < n; ++t) sum += peak[t];
    }
    return sum;
}

}  // namespace

extern "C" {

// Sum over steps of the largest rank load, in units of 1/LCM token; `most` is the tokens of the busiest step.
int64_t dl_peak_sum(const int32_t* columns_EM, int64_t M, int64_t E, int64_t ld, int64_t most, const int64_t* slot_RS,
                    const int64_t* copies_E, int64_t R, int64_t S) {
    int64_t common = 1;
    for (int64_t e = 0; e < E; ++e) common = std::lcm(common, copies_E[e]);
    std::vector<int64_t> unit(E);
    for (int64_t e = 0; e < E; ++e) unit[e] = common / copies_E[e];
    const bool small = most <= std::numeric_limits<int32_t>::max() / common;
    return LCM / common * (small ? peaks<int32_t>(columns_EM, M, ld, slot_RS, unit.data(), R, S)
                                 : peaks<int64_t>(columns_EM, M, ld, slot_RS, unit.data(), R, S));
}

}  // extern "C"
