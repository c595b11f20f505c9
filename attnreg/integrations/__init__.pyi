from attnreg.integrations.callback import AttnRegCallback as AttnRegCallback
from attnreg.integrations.trainer import ADDropTrainer as ADDropTrainer
from attnreg.integrations.trainer import RDropTrainer as RDropTrainer
from attnreg.integrations.trainer import RegularizedTrainer as RegularizedTrainer
from attnreg.integrations.trainer import Seq2SeqADDropTrainer as Seq2SeqADDropTrainer
