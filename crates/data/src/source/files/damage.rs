//! Keeps damaged Parquet and Arrow files from ending the process: their readers panic on some
//! contents, and need stack for each level of a schema.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Maximum number of levels of a schema; a list takes two.
pub(super) const MAX_DEPTH: usize = 128;
/// Maximum number of rows of a file.
pub(super) const MAX_ROWS: usize = u32::MAX as usize;

/// Calls the reader of a crate, whose panic becomes the error that `damaged` makes of a text.
pub(super) fn guarded<T, E>(
    damaged: impl FnOnce(&'static str) -> E,
    read: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(damaged("its content contradicts itself: the file is damaged")))
}

/// Depth of the schema in the footer of a Parquet file; `None` if it cannot be read.
pub(super) fn depth(footer: &[u8]) -> Option<usize> {
    const SCHEMA: i64 = 2;
    let mut thrift = Thrift(footer);
    let mut field = 0;
    loop {
        match thrift.field(&mut field)? {
            LIST if field == SCHEMA => break,
            kind => thrift.skip(kind, MAX_DEPTH)?,
        }
    }
    let (num_elements, kind) = thrift.list()?;
    let (mut deepest, mut open) = (0, Vec::<u64>::new());
    for _ in 0..num_elements {
        let mut children = thrift.num_children(kind)?;
        deepest = deepest.max(open.len());
        if children > 0 {
            open.push(children);
        }
        // a group is complete with its last child, and is itself a child of the one around it
        while children == 0
            && let Some(left) = open.last_mut()
        {
            *left -= 1;
            children = *left;
            if children == 0 {
                open.pop();
            }
        }
    }
    Some(deepest)
}

const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// Bytes in the compact protocol of Thrift.
struct Thrift<'a>(&'a [u8]);

impl Thrift<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.0.split_off_first().copied()
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let number = self.number()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// The type of the next field of a struct, and its number; `None` at the end of the struct.
    fn field(&mut self, number: &mut i64) -> Option<u8> {
        let head = self.byte()?;
        *number = match head >> 4 {
            0 if head != 0 => self.signed()?,
            delta => number.checked_add(delta.into())?,
        };
        (head != 0).then_some(head & 0xf)
    }

    /// Number and type of the elements of a list.
    fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let number = if head >> 4 == 15 { self.number()? } else { (head >> 4).into() };
        Some((number, head & 0xf))
    }

    /// Reads an element of the schema. Returns its number of children.
    fn num_children(&mut self, kind: u8) -> Option<u64> {
        const NUM_CHILDREN: i64 = 5;
        if kind != STRUCT {
            return None;
        }
        let (mut field, mut children) = (0, 0);
        while self.0.first()? != &0 {
            match self.field(&mut field)? {
                5 if field == NUM_CHILDREN => children = self.signed()?.max(0) as u64,
                kind => self.skip(kind, MAX_DEPTH)?,
            }
        }
        self.byte().map(|_| children)
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match kind {
            1 | 2 => Some(()), // a boolean, whose value is its type
            3 => self.byte().map(drop),
            4..=6 => self.number().map(drop),
            7 => self.0.split_off(..8).map(drop),
            8 => {
                let length = usize::try_from(self.number()?).ok()?;
                self.0.split_off(..length).map(drop)
            }
            LIST | 10 => {
                let (number, kind) = self.list()?;
                // booleans have a byte in a list
                let kind = if kind < 3 { 3 } else { kind };
                (0..number).try_for_each(|_| self.skip(kind, depth))
            }
            STRUCT => {
                let mut field = 0;
                while self.0.first()? != &0 {
                    let kind = self.field(&mut field)?;
                    self.skip(kind, depth)?;
                }
                self.byte().map(drop)
            }
            _ => None, // Parquet has no maps
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The footer of a file whose schema is groups inside of each other, with a column at each
    /// level: version, schema, number of rows.
    fn footer(levels: usize) -> Vec<u8> {
        let element = |name: &[u8], children: u8| {
            let head = [&[0x48, name.len() as u8][..], name].concat();
            if children > 0 {
                [&head[..], &[0x15, children * 2, 0]].concat()
            } else {
                [&head[..], &[0]].concat()
            }
        };
        let mut elements = Vec::new();
        for _ in 0..levels {
            elements.extend(element(b"group", 2));
            elements.extend(element(b"leaf", 0));
        }
        elements.extend(element(b"last", 0));
        let number = 2 * levels + 1;
        let head = [0x15, 2, 0x19, 0xfc, (number & 0x7f) as u8 | 0x80, (number >> 7) as u8];
        [&head[..], &elements, &[0x16, 4, 0]].concat()
    }

    #[test]
    fn the_depth_of_a_schema_is_that_of_its_deepest_column() {
        for levels in [1, 2, 100, 5000] {
            assert_eq!(depth(&footer(levels)), Some(levels));
        }
        let whole = footer(3);
        for length in 0..whole.len() - 3 {
            assert_eq!(depth(&whole[..length]), None, "cut to {length}");
        }
    }

    #[test]
    fn a_panic_of_a_reader_is_an_error() {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let found = guarded(str::to_owned, || -> Result<(), _> { panic!("index out of range") });
        std::panic::set_hook(before);
        assert_eq!(found, Err("its content contradicts itself: the file is damaged".to_owned()));
    }
}
