"""The words that the generated texts are made of. Lists are fixed: a seed gives the same texts as long as they are."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


COLOURS = _words("""red blue green yellow black white brown grey orange purple pink silver golden amber copper crimson
 scarlet violet indigo olive ivory maroon turquoise bronze""")

OBJECTS = _words("""lantern ladder crate barrel bucket hammer saw chisel shovel broom kettle teapot bowl plate basket hamper
 blanket pillow carpet curtain mirror clock radio camera lens tripod guitar drum flute trumpet violin piano bell whistle
 ledger notebook folder envelope letter parcel stamp map chart atlas compass telescope barometer thermometer ruler pencil
 crayon brush easel canvas statue vase candle lamp torch mattress chair table bench stool cupboard drawer wardrobe
 door window shutter fence gate key padlock chain rope net anchor paddle raft canoe kayak boat sail oar wheel axle engine
 pump valve pipe tap hose tank boiler furnace heater fan cable switch motor drill wrench screwdriver bolt nail
 tent backpack saddle harness helmet jacket coat glove sweater apron shirt button needle ribbon blade funnel jug
 flask bottle goblet tray spoon fork ladle kitten puppet puzzle lock kite balloon marble sled scooter bicycle wagon cart
 trolley crane tractor plough sickle rake trowel seedling cactus fern tulip orchid melon pumpkin turnip""")

PLACE_KINDS = _words("""north south east west old new upper lower inner outer long low grand stone iron river harbour market
 garden winter summer castle church station""")

PLACE_NOUNS = _words("""quay gate tower mill bridge dock barn cellar hall yard chapel stable attic workshop kitchen library
 office pier tunnel square terrace corner annex storeroom lodge depot canteen court passage wharf cabin meadow""")

FIRST_NAMES = _words("""Mara Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karin Leon Maria Nadia Oscar Paula
 Quentin Rosa Simon Tessa Ulrich Vera Walter Xenia Yusuf Zoe Adam Berta Carlos Dora Emil Flora Georg Hanna Ivan Julia Kofi Laura
 Marco Nora Otto Petra Ralf Sofia Tomas Ursula Viktor Wanda Yara Zeno Agnes Bruno Celia Dario Edith Frank Gloria Hugo Ida
 Jakob Kira Ludwig Mina Nils Olga Pablo Rita Stefan Thea Udo Viola Wim Yvonne Aron Bella Cyril Delia Enzo Fiona Gavin
 Helga Igor Jana Kurt Lena Milan Nina Olaf Pia Ruben Selma Theo Una Vito Wilma Alma Basil Cora Dirk Elsa Floyd Gina Hektor
 Iris Jorge Katja Lars Mona Noel Orla Piet Roman Silas Tilda Umar Vince Willa Yann Zelda""")

_NAME_STARTS = _words("""Lin Hal Ber Mor Sten Ost Wei Kal Dor Fen Gar Hol Jan Kes Lam Mel Nor Pel Quil Ros Sal Tor Ul Van Wal
 Zim Ash Brin Cal Dun Eck Far Gol Har Ing Kar Lor Mun Ned Par Ran Sor""")
_NAME_ENDS = _words("""dt berg man sen vorsen well ston ford ler mann ski ova etti ier ard ling mere worth by dal stad rup heim
 bach feld ander ino escu ic oy""")
LAST_NAMES = [start + end for start in _NAME_STARTS for end in _NAME_ENDS]

ANIMALS = _words("fox hare otter owl mouse badger heron cat dog goat crow beaver hedgehog donkey pony robin")
TRAITS = _words("small quiet clever curious brave gentle old young lonely cheerful patient careful")
FOODS = _words("bread soup cheese apples honey rice plums porridge pancakes tea cake nuts")
WEATHER = _words("rain snow fog wind sunshine thunder drizzle frost")
MACHINES = _words("pump fan heater boiler relay sensor motor valve")
