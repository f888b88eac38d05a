//! The colours of a kind of pictures. A file of palette colours has 256 at most.

/// What a pixel looks like.
pub(in crate::cli) trait Palette: Copy {
    /// Where nothing is drawn.
    const PAPER: Self;
    /// Of letters.
    const INK: Self;

    /// Its place among the colours.
    fn index(self) -> u8;

    /// Red, green and blue of each, in the order of their index.
    fn colours() -> Vec<[u8; 3]>;
}
