"""Word lists and random parts of prompts for all task families, in English and Chinese."""

import random
from collections.abc import Callable
from dataclasses import dataclass

LANGUAGES = ("en", "zh")

WORDS = {
    "en": (
        "red blue green black white gold gray pink brown dark dog cat fish bird horse sheep wolf bear lion tiger "
        "mouse duck goose frog snake apple pear plum grape lemon peach melon bread rice soup cake milk tea salt "
        "sugar honey chair table lamp door wall roof floor window box cup plate spoon knife bag hat coat shoe "
        "ring clock book pen paper desk key rope wheel boat ship train car road bridge river lake sea hill tree "
        "leaf flower grass seed root stone sand snow rain wind cloud star moon sun fire ice north south east "
        "west day night hour week month king queen child friend teacher farmer doctor baker singer house farm "
        "shop school market garden forest desert island valley song story game letter number color music dance "
        "light sound smell"
    ).split(),
    "zh": (
        "红色 蓝色 绿色 黑色 白色 小狗 小猫 大鱼 飞鸟 白马 山羊 老虎 狮子 青蛙 苹果 香蕉 西瓜 葡萄 桃子 面包 "
        "米饭 蛋糕 牛奶 茶叶 椅子 桌子 台灯 大门 窗户 杯子 盘子 帽子 大衣 鞋子 手表 书本 钢笔 白纸 钥匙 车轮 "
        "小船 火车 汽车 公路 大桥 河流 湖水 大海 高山 树木 叶子 花朵 青草 石头 沙子 雪花 雨水 大风 白云 星星 "
        "月亮 太阳 火焰 国王 孩子 朋友 老师 农民 医生 房子 农场 商店 学校 市场 花园 森林 故事 音乐"
    ).split(),
}

NAMES = {
    "en": tuple(
        "Ann Ben Cara Dan Emma Finn Gina Hugo Ivy Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor".split()
    ),
    "zh": tuple(
        "小明 小红 小刚 小丽 小华 小军 小芳 小强 小燕 小龙 王伟 李娜 张敏 刘洋 陈静 杨帆 赵磊 周婷 吴昊 孙悦".split()
    ),
}
CITIES = {
    "en": tuple(
        "Rome Paris Oslo Lima Cairo Delhi Tokyo Berlin Madrid Vienna Dublin Athens Lisbon Prague Boston".split()
    ),
    "zh": tuple("北京 上海 广州 深圳 成都 杭州 南京 武汉 西安 重庆 天津 苏州 长沙 青岛 厦门".split()),
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its reply, which is the answer, or ends in a line `Answer: ...` / `答案：...`."""

    prompt: str
    reply: str


Family = Callable[[random.Random, str], Turn]  # makes a turn of one kind of task in a language


def pick_phrase(rng: random.Random, language: str, *, en: tuple[str, ...], zh: tuple[str, ...]) -> str:
    """Draw one of a family's wordings in `language`."""
    return rng.choice(en if language == "en" else zh)


def draw_size(rng: random.Random, median: float, *, least: int, most: int, sigma: float = 0.65) -> int:
    """Draw a log-normal item count with the given median, clamped; one in 100 is 6-40 times longer."""
    size = rng.lognormvariate(0.0, sigma) * median
    if rng.random() < 0.01:
        size *= rng.uniform(6, 40)
    return max(least, min(most, round(size)))


def draw_words(rng: random.Random, language: str, count: int) -> list[str]:
    """Draw `count` words, all different as long as the list of words allows it."""
    pool = WORDS[language]
    words: list[str] = []
    while len(words) < count:
        words.extend(rng.sample(pool, min(len(pool), count - len(words))))
    return words


def draw_separator(rng: random.Random, language: str) -> str:
    """Draw the separator of a list's items in a prompt."""
    return rng.choice((", ", " ") if language == "en" else ("、", " "))


def with_answer(language: str, steps: list[str], answer: str) -> str:
    """Return worked steps, one a line, and the line of the final answer."""
    return "\n".join([*steps, ("Answer: " if language == "en" else "答案：") + answer])
