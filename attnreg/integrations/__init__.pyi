from attnreg.integrations.callback import AttnRegCallback as AttnRegCallback
from attnreg.integrations.r_drop import RDropTrainer as RDropTrainer
from attnreg.integrations.trainer import ADDropTrainer as ADDropTrainer
from attnreg.integrations.trainer import Seq2SeqADDropTrainer as Seq2SeqADDropTrainer
