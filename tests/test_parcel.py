"""A parcel arrives as what is in it."""

import pickle

import cloudpickle
from hypothesis import given
from hypothesis import strategies as st

from meshrl.parcel import parcel
from meshrl.rewards import Grade

values = st.recursive(
    st.none() | st.floats(allow_nan=False) | st.text() | st.builds(Grade, st.none(), st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_a_parcel_arrives_as_the_value_itself(value) -> None:
    for pickler in (pickle, cloudpickle):
        assert pickle.loads(pickler.dumps(parcel(value))) == value
        assert pickle.loads(pickler.dumps([parcel(value), {"key": parcel(value)}])) == [value, {"key": value}]
