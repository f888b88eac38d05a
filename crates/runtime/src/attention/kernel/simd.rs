//! The vector operations that the kernel is written in.

/// A set of vector instructions, by a token that exists only where the processor has them.
///
/// The token is what makes the operations safe: [`Avx512`](super::avx512::Avx512) and
/// [`Avx2`](super::avx2::Avx2) are made by detection alone. Every method is inlined into a function
/// that enables the instructions, or the vectors would travel through memory.
pub(super) trait Simd: Copy {
    /// `LANES` values of f32.
    type Vector: Copy;
    /// Values in a vector: 16, 8 or 1.
    const LANES: usize;
    /// Partial sums that [`fold`](Self::fold) leaves of a vector.
    const PARTS: usize;

    /// The same value in all lanes.
    fn splat(self, value: f32) -> Self::Vector;
    /// The first `LANES` values.
    fn load(self, from: &[f32]) -> Self::Vector;
    /// Stores to the first `LANES` values.
    fn store(self, to: &mut [f32], vector: Self::Vector);
    /// Stores to the first `LANES` values, rounded to f16.
    fn store_f16(self, to: &mut [u16], vector: Self::Vector);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// To the nearest whole number.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// `2^n` for whole `n` from -126 to 127.
    fn power_of_two(self, n: Self::Vector) -> Self::Vector;
    /// Whether any lane of `a` is larger than that of `b`.
    fn any_greater(self, a: Self::Vector, b: Self::Vector) -> bool;
    /// The largest lane.
    fn largest(self, a: Self::Vector) -> f32;
    /// The first half of adding up the lanes of four vectors: `[PARTS, 4]` partial sums. The rest
    /// waits until [`total`](Self::total) can do it for more vectors at once.
    fn fold(self, vectors: [Self::Vector; 4], parts: &mut [f32]);
    /// The sums over the lanes of `LANES` vectors, from their parts.
    fn total(self, parts: &[f32]) -> Self::Vector;

    /// The same f16 in all lanes.
    ///
    /// # Safety
    /// `from` has one element.
    unsafe fn splat_f16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// `from` has `LANES` elements.
    unsafe fn load_f32(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// `from` has `LANES` elements.
    unsafe fn load_f16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// `from` has `LANES` elements.
    unsafe fn load_bf16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// `from` has `LANES` elements.
    unsafe fn load_f8_e4m3(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// `from` has `LANES` bytes.
    unsafe fn load_i8(self, from: *const u8) -> Self::Vector;
    /// The low or high nibble of each byte, less 8.
    ///
    /// # Safety
    /// `from` has `LANES` bytes.
    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> Self::Vector;
    /// Asks for the cache line at an address, which need not be mapped, to be brought to the
    /// second-level cache. The first level has too few requests in flight for a whole memory's
    /// bandwidth (24 on Zen 4): fetching into it is half as fast.
    fn prefetch(self, address: *const u8);
}

/// `2^x`, and `2^x - 1` without cancellation. Below -126 it is 2^-126, which no sum of attention
/// weights notices (the largest weight is 1). NaN stays NaN.
///
/// The polynomial is the Taylor series of `2^r - 1` for |r| <= 1/2: the first term left out is at
/// most 1.2e-7 of the result.
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::Vector) -> (S::Vector, S::Vector) {
    // ln(2)^k / k! for k from 5 to 1
    const COEFFICIENTS: [f32; 5] =
        [0.001_333_355_8, 0.009_618_129, 0.055_504_11, 0.240_226_5, std::f32::consts::LN_2];
    let x = simd.max(simd.splat(-126.0), x);
    let n = simd.round(x);
    let r = simd.sub(x, n);
    let mut series = simd.splat(0.000_154_035_3);
    for coefficient in COEFFICIENTS {
        series = simd.mul_add(series, r, simd.splat(coefficient));
    }
    let series = simd.mul(series, r);
    let power = simd.power_of_two(n);
    let less_one = simd.mul_add(power, series, simd.sub(power, simd.splat(1.0)));
    (simd.mul_add(power, series, power), less_one)
}

/// The hyperbolic tangent, as precise for small `x` as for large.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    // Beyond 20 it is 1 in f32; `max` takes its second argument for NaN.
    let limit = simd.splat(-20.0);
    let x = simd.max(limit, x);
    let negated = simd.max(limit, simd.sub(simd.splat(0.0), x));
    let twice = simd.mul(negated, simd.splat(-2.0 * std::f32::consts::LOG2_E));
    let (_, less_one) = exp2(simd, twice);
    simd.div(less_one, simd.add(less_one, simd.splat(2.0)))
}

/// Implements [`Simd`] for an instruction set of x86: the same for both, but for the instructions.
/// `load_words`, `store_words` and `load_bytes` are for as many 16-bit and 8-bit elements as a vector
/// has lanes.
macro_rules! implement_simd {
    (
        $simd:ty, $vector:ty, $lanes:literal, $parts:literal,
        splat: $splat:ident, add: $add:ident, sub: $sub:ident, mul: $mul:ident, div: $div:ident, mul_add: $mul_add:ident, max: $max:ident, round: $round:ident, power_of_two: $power_of_two:ident, any_greater: $any_greater:ident, largest: $largest:ident, fold: $fold:ident, total: $total:ident, splat_f16: $splat_f16:ident, load: $load:ident, store: $store:ident, load_words: $load_words:ident, store_words: $store_words:ident, load_bytes: $load_bytes:ident, f16: $f16:ident, to_f16: $to_f16:ident, bf16: $bf16:ident, f8_e4m3: $f8_e4m3:ident, i8: $i8:ident, nibbles: $nibbles:ident $(,)?
    ) => {
        impl Simd for $simd {
            type Vector = $vector;
            const LANES: usize = $lanes;
            const PARTS: usize = $parts;

            #[inline(always)]
            fn splat(self, value: f32) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $splat(value) }
            }

            #[inline(always)]
            fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $add(a, b) }
            }

            #[inline(always)]
            fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $sub(a, b) }
            }

            #[inline(always)]
            fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $mul(a, b) }
            }

            #[inline(always)]
            fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $div(a, b) }
            }

            #[inline(always)]
            fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $mul_add(a, b, c) }
            }

            #[inline(always)]
            fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $max(a, b) }
            }

            #[inline(always)]
            fn round(self, a: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $round(a) }
            }

            #[inline(always)]
            fn power_of_two(self, n: Self::Vector) -> Self::Vector {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $power_of_two(n) }
            }

            #[inline(always)]
            fn any_greater(self, a: Self::Vector, b: Self::Vector) -> bool {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $any_greater(a, b) }
            }

            #[inline(always)]
            fn largest(self, a: Self::Vector) -> f32 {
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $largest(a) }
            }

            #[inline(always)]
            fn fold(self, vectors: [Self::Vector; 4], parts: &mut [f32]) {
                // SAFETY: the token exists, so the processor has the instructions.
                let folded = unsafe { $fold(vectors) };
                self.store(parts, folded);
            }

            #[inline(always)]
            fn total(self, parts: &[f32]) -> Self::Vector {
                let parts: &[f32; Self::LANES * Self::PARTS] =
                    parts.first_chunk().expect("parts of a vector of sums");
                let vector = |part: usize| self.load(&parts[part * Self::LANES..]);
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $total(std::array::from_fn(vector)) }
            }

            #[inline(always)]
            unsafe fn splat_f16(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the element; any alignment will do.
                let half = unsafe { from.cast::<i16>().read_unaligned() };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $splat_f16(half) }
            }

            #[inline(always)]
            unsafe fn load_f32(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                unsafe { $load(from.cast()) }
            }

            #[inline(always)]
            unsafe fn load_f16(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                let bits = unsafe { $load_words(from.cast()) };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $f16(bits) }
            }

            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                let bits = unsafe { $load_words(from.cast()) };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $bf16(bits) }
            }

            #[inline(always)]
            unsafe fn load_f8_e4m3(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                let bits = unsafe { $load_bytes(from.cast()) };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $f8_e4m3(bits) }
            }

            #[inline(always)]
            unsafe fn load_i8(self, from: *const u8) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                let bits = unsafe { $load_bytes(from.cast()) };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $i8(bits) }
            }

            #[inline(always)]
            unsafe fn load_nibbles(self, from: *const u8, high: bool) -> Self::Vector {
                // SAFETY: the caller promises the elements; any alignment will do.
                let bits = unsafe { $load_bytes(from.cast()) };
                // SAFETY: the token exists, so the processor has the instructions.
                unsafe { $nibbles(bits, high) }
            }

            #[inline(always)]
            fn load(self, from: &[f32]) -> Self::Vector {
                let from: &[f32; Self::LANES] = from.first_chunk().expect("a vector of values");
                // SAFETY: the array holds a vector; any alignment will do.
                unsafe { $load(from.as_ptr()) }
            }

            #[inline(always)]
            fn store(self, to: &mut [f32], vector: Self::Vector) {
                let to: &mut [f32; Self::LANES] = to.first_chunk_mut().expect("room for a vector");
                // SAFETY: the array holds a vector; any alignment will do.
                unsafe { $store(to.as_mut_ptr(), vector) }
            }

            #[inline(always)]
            fn store_f16(self, to: &mut [u16], vector: Self::Vector) {
                let to: &mut [u16; Self::LANES] = to.first_chunk_mut().expect("room for a vector");
                // SAFETY: the token exists, so the processor has the instructions.
                let halves = unsafe { $to_f16(vector) };
                // SAFETY: the array holds a vector; any alignment will do.
                unsafe { $store_words(to.as_mut_ptr().cast(), halves) }
            }

            #[inline(always)]
            fn prefetch(self, address: *const u8) {
                // SAFETY: a prefetch never faults.
                unsafe {
                    std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                        address.cast(),
                    )
                }
            }
        }
    };
}
pub(super) use implement_simd;
