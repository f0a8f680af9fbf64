//! Numbers as header values.

use std::cell::RefCell;

use http::HeaderValue;

/// Below this, a number's text is at hand: most limits, what is left of them, and seconds up to two hours.
const AT_HAND: usize = 10_000;

/// All of these numbers, each with four digits.
static DIGITS: [[u8; 4]; AT_HAND] = {
    let mut digits = [[0; 4]; AT_HAND];
    let mut number = 0;
    while number < AT_HAND {
        let (mut place, mut rest) = (4, number);
        while place > 0 {
            place -= 1;
            digits[number][place] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        number += 1;
    }
    digits
};

/// Read once, by the compiler: what could panic here does not compile.
static TEXT: &str = match str::from_utf8(DIGITS.as_flattened()) {
    Ok(text) => text,
    Err(_) => panic!("digits are ASCII"),
};

/// What `HeaderValue::from` gives in two allocations: in none for a number at hand, in one for any other.
pub(super) fn header_value(number: u64) -> HeaderValue {
    match at_hand(number) {
        Some(text) => HeaderValue::from_static(text),
        None => written(number),
    }
}

thread_local! {
    /// A few large numbers that this thread has written, each in the place that it falls into.
    static WRITTEN: RefCell<[Option<(u64, HeaderValue)>; PLACES]> = const { RefCell::new([const { None }; PLACES]) };
}

/// A prime, so that round numbers do not all fall into one place.
const PLACES: usize = 7;

/// The same, of a number that comes again and again, such as a limit. One that is not at hand is written once, and its
/// text is shared by the headers of a thread: threads that shared one would meet at the count of who has it.
pub(super) fn lasting_header_value(number: u64) -> HeaderValue {
    if let Some(text) = at_hand(number) {
        return HeaderValue::from_static(text);
    }
    let shared = WRITTEN.try_with(|places| {
        let place = &mut places.borrow_mut()[(number % PLACES as u64) as usize];
        match place {
            Some((there, value)) if *there == number => value.clone(),
            _ => place.insert((number, written(number))).1.clone(),
        }
    });
    // Where a thread is just ending, it has no place left.
    shared.unwrap_or_else(|_| written(number))
}

fn at_hand(number: u64) -> Option<&'static str> {
    let start = 4 * usize::try_from(number).ok().filter(|index| *index < AT_HAND)?;
    let zeros = [1_000, 100, 10].into_iter().filter(|power| number < *power).count();
    Some(&TEXT[start + zeros..start + 4])
}

/// Four digits at a time, from the last ones on.
fn written(number: u64) -> HeaderValue {
    let (mut digits, mut start, mut rest) = ([0; 20], 20, number);
    let first = loop {
        if let Some(first) = at_hand(rest) {
            break first.as_bytes();
        }
        start -= 4;
        digits[start..start + 4].copy_from_slice(&DIGITS[(rest % AT_HAND as u64) as usize]);
        rest /= AT_HAND as u64;
    };
    start -= first.len();
    digits[start..start + first.len()].copy_from_slice(first);
    HeaderValue::from_bytes(&digits[start..]).unwrap_or_else(|_| number.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_written_as_it_always_is() {
        let edges = [u64::from(u32::MAX), u64::MAX / 4, u64::MAX / 4 + 1, u64::MAX - 1, u64::MAX];
        let lengths = (0..20).map(|digits| 10_u64.pow(digits)).flat_map(|power| [power - 1, power, power + 1]);
        for number in (0..=10_001).chain(edges).chain(lengths) {
            assert_eq!(header_value(number), HeaderValue::from(number));
            let twice = [lasting_header_value(number), lasting_header_value(number)];
            assert_eq!(twice, [HeaderValue::from(number), HeaderValue::from(number)]);
        }
    }
}
