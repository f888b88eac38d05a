//! Pictures for people: a few colours, rectangles and words, written as PNG.
//!
//! The map of a sequence can be drawn as SVG as well, where a reader's program knows fonts. What has a value for each
//! pixel would be a hundred times larger so.

mod font;
mod palette;
mod png;

use std::marker::PhantomData;

use font::{GLYPH_HEIGHT, GLYPH_WIDTH, glyph};

pub(super) use palette::Palette;
pub(super) use png::write;

#[cfg(test)]
pub(super) use png::tests::decoded;

/// Pixels of the picture for one of a glyph.
const TEXT_SCALE: usize = 2;
/// Pixels from a letter to the next, and from a line to the next.
pub(super) const LETTER_WIDTH: usize = (GLYPH_WIDTH + 1) * TEXT_SCALE;
pub(super) const LINE_HEIGHT: usize = (GLYPH_HEIGHT + 1) * TEXT_SCALE;

/// The last step from dark to bright.
pub(super) const BRIGHTEST: u8 = 239;

/// What a pixel of a picture of values looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colour {
    /// A step from dark (0) to [`BRIGHTEST`].
    Step(u8),
    Paper,
    Ink,
    /// Of what cannot be told as brightness.
    Alarm,
    /// Of what stands out.
    Mark,
    Bar,
}

impl Colour {
    const OTHERS: [Colour; 5] =
        [Colour::Paper, Colour::Ink, Colour::Alarm, Colour::Mark, Colour::Bar];

    fn red_green_blue(self) -> [u8; 3] {
        match self {
            Colour::Step(step) => of_step(step.min(BRIGHTEST)),
            Colour::Paper => [255, 255, 255],
            Colour::Ink => [0, 0, 0],
            Colour::Alarm => [0, 229, 255],
            Colour::Mark => [214, 39, 40],
            Colour::Bar => [31, 119, 180],
        }
    }
}

impl Palette for Colour {
    const PAPER: Colour = Colour::Paper;
    const INK: Colour = Colour::Ink;

    fn index(self) -> u8 {
        match self {
            Colour::Step(step) => step.min(BRIGHTEST),
            Colour::Paper => BRIGHTEST + 1,
            Colour::Ink => BRIGHTEST + 2,
            Colour::Alarm => BRIGHTEST + 3,
            Colour::Mark => BRIGHTEST + 4,
            Colour::Bar => BRIGHTEST + 5,
        }
    }

    fn colours() -> Vec<[u8; 3]> {
        let steps = (0..=BRIGHTEST).map(Colour::Step);
        steps.chain(Colour::OTHERS).map(Colour::red_green_blue).collect()
    }
}

/// From black over violet and orange to a pale yellow: each step is brighter than the one before, so that the
/// picture can be read in grey too.
fn of_step(step: u8) -> [u8; 3] {
    const ANCHORS: [[u8; 3]; 6] =
        [[0, 0, 4], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];
    let last = ANCHORS.len() - 1;
    let at = usize::from(step) * last;
    let below = (at / usize::from(BRIGHTEST)).min(last - 1);
    let beyond = at - below * usize::from(BRIGHTEST);
    [0, 1, 2].map(|channel| {
        let [from, to] = [below, below + 1].map(|anchor| usize::from(ANCHORS[anchor][channel]));
        let mixed = from * (usize::from(BRIGHTEST) - beyond) + to * beyond;
        u8::try_from(mixed / usize::from(BRIGHTEST)).unwrap_or(u8::MAX)
    })
}

/// A picture that is being drawn.
#[derive(Debug)]
pub(super) struct Canvas<C = Colour> {
    width: usize,
    height: usize,
    /// Colours by their index, row by row.
    pixels: Vec<u8>,
    colours: PhantomData<C>,
}

impl<C: Palette> Canvas<C> {
    pub(super) fn new(width: usize, height: usize) -> Canvas<C> {
        let pixels = vec![C::PAPER.index(); width * height];
        Canvas { width, height, pixels, colours: PhantomData }
    }

    /// A rectangle, as much of it as the picture has.
    pub(super) fn fill(
        &mut self, (x, y): (usize, usize), (width, height): (usize, usize), colour: C,
    ) {
        let columns = x.min(self.width)..(x + width).min(self.width);
        for row in y.min(self.height)..(y + height).min(self.height) {
            let start = row * self.width;
            self.pixels[start + columns.start..start + columns.end].fill(colour.index());
        }
    }

    /// Words whose upper left corner is there.
    pub(super) fn write(&mut self, (x, y): (usize, usize), words: &str) {
        for (number, character) in words.chars().enumerate() {
            for (column, bits) in glyph(character).into_iter().enumerate() {
                for row in (0..GLYPH_HEIGHT).filter(|row| bits >> row & 1 == 1) {
                    let at =
                        (x + number * LETTER_WIDTH + column * TEXT_SCALE, y + row * TEXT_SCALE);
                    self.fill(at, (TEXT_SCALE, TEXT_SCALE), C::INK);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self, colour: C) -> usize {
        self.pixels.iter().map(|pixel| usize::from(*pixel == colour.index())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_become_brighter() {
        let brightness = |step| of_step(step).map(u32::from).into_iter().sum::<u32>();
        assert!((1..=BRIGHTEST).all(|step| brightness(step) >= brightness(step - 1)));
        assert_eq!(of_step(0), [0, 0, 4]);
        assert_eq!(of_step(BRIGHTEST), [252, 255, 164]);
    }

    #[test]
    fn what_is_beyond_the_edge_is_left_out() {
        let mut canvas = Canvas::new(4, 3);
        canvas.fill((3, 2), (10, 10), Colour::Mark);
        canvas.fill((40, 50), (1, 1), Colour::Alarm);
        canvas.write((100, 100), "beyond");
        assert_eq!((canvas.count(Colour::Mark), canvas.count(Colour::Paper)), (1, 11));
    }
}
