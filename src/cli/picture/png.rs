//! A canvas as a PNG of palette colours: what has few colours and large areas becomes small.

use std::io::{self, Write};

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};

use super::{Canvas, Palette};

const SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
/// Bits of a pixel, pixels are indices of a palette, and the only compression, filters and order but one.
const KIND: [u8; 5] = [8, 3, 0, 0, 0];
/// Pixels stay as they are before they are compressed: neighbours of a palette are no neighbours in value.
const NO_FILTER: u8 = 0;

/// Writes the picture.
pub(in crate::cli) fn write<C: Palette>(canvas: &Canvas<C>, mut out: impl Write) -> io::Result<()> {
    out.write_all(&SIGNATURE)?;
    let mut header = Vec::new();
    for side in [canvas.width, canvas.height] {
        let side = u32::try_from(side).map_err(io::Error::other)?;
        header.extend(side.to_be_bytes());
    }
    header.extend(KIND);
    chunk(&mut out, *b"IHDR", &header)?;
    chunk(&mut out, *b"PLTE", C::colours().as_flattened())?;
    let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
    for row in canvas.pixels.chunks_exact(canvas.width) {
        compressed.write_all(&[NO_FILTER])?;
        compressed.write_all(row)?;
    }
    chunk(&mut out, *b"IDAT", &compressed.finish()?)?;
    chunk(&mut out, *b"IEND", &[])
}

fn chunk(out: &mut impl Write, name: [u8; 4], bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut sum = Crc::new();
    sum.update(&name);
    sum.update(bytes);
    out.write_all(&length.to_be_bytes())?;
    out.write_all(&name)?;
    out.write_all(bytes)?;
    out.write_all(&sum.sum().to_be_bytes())
}

#[cfg(test)]
pub(in crate::cli) mod tests {
    use super::super::Colour;
    use super::*;
    use std::io::Read;

    /// Width and pixels of such a file, row by row.
    pub(in crate::cli) fn decoded(file: &[u8]) -> (usize, Vec<[u8; 3]>) {
        let found = chunks(file);
        let side = |at: usize| u32::from_be_bytes(found[0].1[at..at + 4].try_into().unwrap());
        let width = side(0) as usize;
        let mut rows = Vec::new();
        flate2::read::ZlibDecoder::new(&found[2].1[..]).read_to_end(&mut rows).unwrap();
        let rows: Vec<&[u8]> = rows.chunks(width + 1).collect();
        assert_eq!(rows.len(), side(4) as usize);
        let colours = found[1].1.as_chunks::<3>().0;
        let pixels = rows.into_iter().flat_map(|row| &row[1..]);
        (width, pixels.map(|index| colours[usize::from(*index)]).collect())
    }

    /// The chunks of a file by name, each of which must have its checksum.
    fn chunks(mut file: &[u8]) -> Vec<(String, Vec<u8>)> {
        assert_eq!(file[..8], SIGNATURE);
        file = &file[8..];
        let mut found = Vec::new();
        while !file.is_empty() {
            let length = u32::from_be_bytes(file[..4].try_into().unwrap()) as usize;
            let mut sum = Crc::new();
            sum.update(&file[4..8 + length]);
            assert_eq!(file[8 + length..12 + length], sum.sum().to_be_bytes());
            let name = String::from_utf8(file[4..8].to_vec()).unwrap();
            found.push((name, file[8..8 + length].to_vec()));
            file = &file[12 + length..];
        }
        found
    }

    #[test]
    fn pixels_come_back() {
        let mut canvas = Canvas::new(3, 2);
        canvas.fill((1, 0), (1, 1), Colour::Step(7));
        canvas.fill((2, 1), (1, 1), Colour::Mark);
        let mut file = Vec::new();
        write(&canvas, &mut file).unwrap();
        let found = chunks(&file);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["IHDR", "PLTE", "IDAT", "IEND"]);
        assert_eq!(found[0].1, [0, 0, 0, 3, 0, 0, 0, 2, 8, 3, 0, 0, 0]);
        let mut rows = Vec::new();
        flate2::read::ZlibDecoder::new(&found[2].1[..]).read_to_end(&mut rows).unwrap();
        let (paper, mark) = (Colour::Paper.index(), Colour::Mark.index());
        assert_eq!(rows, [0, paper, 7, paper, 0, paper, paper, mark]);
        let colour = |index: u8| &found[1].1[usize::from(index) * 3..][..3];
        assert_eq!(colour(mark), Colour::Mark.red_green_blue());
        assert_eq!(colour(paper), [255, 255, 255]);
        assert_eq!(colour(7), Colour::Step(7).red_green_blue());
    }
}
